"""A GGUF of a tiny Llama, written by the gguf package, for whoever reads one."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

HIDDEN, CHANNELS, HEADS, LAYERS = 64, 96, 2, 2
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"


def write_tiny_gguf(file: Path, *, architecture: str = "llama", has_scaled_rope: bool = False) -> list[str]:
    """Random weights, partly quantized, with a byte-level tokenizer; its tokens are returned."""
    writer = GGUFWriter(file, architecture)
    tokens = ["<unk>", "<s>", "</s>", *(chr(33 + n) for n in range(94)), "Ġ", "th", "the"]
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(CHANNELS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    for name, shape in _shapes(len(tokens)).items():
        weights = (generator.normal(size=shape) * 0.1).astype(np.float32)
        kind = GGMLQuantizationType.Q8_0 if name.endswith("attn_v.weight") else GGMLQuantizationType.F32
        writer.add_tensor(name, quants.quantize(weights, kind), raw_dtype=kind)
    if has_scaled_rope:
        writer.add_tensor("rope_freqs.weight", np.ones(HIDDEN // HEADS // 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokens


def _shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"{prefix}.{part}.weight"] = (HIDDEN, HIDDEN)
        for part in ("ffn_gate", "ffn_up"):
            shapes[f"{prefix}.{part}.weight"] = (CHANNELS, HIDDEN)
        shapes[f"{prefix}.ffn_down.weight"] = (HIDDEN, CHANNELS)
        shapes |= {f"{prefix}.attn_norm.weight": (HIDDEN,), f"{prefix}.ffn_norm.weight": (HIDDEN,)}
    return shapes
