"""The families that are understood, each as what it adds to transformers' own plan of it.

A `base_model_tp_plan` names projections as column- or row-parallel. It does not say what a unit is, how packed
projections are laid out, which gradients are partial, or anything about embedding, head and loss. A family that is
not in the table is refused: a parameter that nobody described would be divided wrongly in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from uneven.modelspec.settings import Rule


@dataclass(frozen=True, slots=True)
class Attention:
    """How heads lie in the projections of an attention module.

    `separate`: q, k and v projections. `packed`: one, with a band each for q, k and v. `fused`: one, with q, k and v
    of each head together. `latent`: DeepSeek's, in which heads are made from narrow latents that all devices compute.
    `norms` of queries and keys are over one head or over the full width; `norms_if` says whether there are any.
    """

    kind: Literal["separate", "packed", "fused", "latent"] = "separate"
    module: str = "self_attn"
    out: str = "o_proj"
    qkv_bias: Rule = False
    out_bias: Rule = False
    norms: Literal["none", "per_head", "full_width"] = "none"
    norms_if: Rule = True
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norm_bias: bool = False
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class FeedForward:
    """`columns` are the projections to the channels, or one that holds gate and up in two bands; `row` leads back."""

    columns: tuple[str, ...] = ("gate_proj", "up_proj")
    row: str = "down_proj"
    is_packed: bool = False
    bias: Rule = False


@dataclass(frozen=True, slots=True)
class Experts:
    """Stacked experts behind a router, in the layers that have them. Names are keys of the configuration, of `num` the
    one that is there.

    `is_interleaved`: gate and up alternate, matrices are transposed, and there are biases (GPT-OSS).
    `has_router_loss`: transformers adds a balance loss where the configuration has `output_router_logits`.
    """

    num: tuple[str, ...]
    width: str
    router: str = "gate"
    router_bias: bool = False
    is_interleaved: bool = False
    num_shared: str | None = None
    has_router_loss: bool = False


LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
SANDWICH_NORMS = (*LAYER_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family departs from Llama; `defaults` are those of its configuration class in transformers 5.24."""

    attention: Attention = Attention()
    feed_forward: FeedForward | None = FeedForward()
    experts: Experts | None = None
    norms: tuple[str, ...] = LAYER_NORMS
    norm_bias: bool = False
    norm_init: Literal["ones", "zeros"] = "ones"
    body: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    head_bias: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_PHI_MLP = FeedForward(columns=("fc1",), row="fc2", bias=True)
_NEOX_MLP = FeedForward(columns=("dense_h_to_4h",), row="dense_4h_to_h", bias=True)
_QUERY_KEY_NORMS = Attention(qkv_bias="attention_bias", out_bias="attention_bias", norms="per_head")
_ATTENTION_BIAS = Attention(qkv_bias="attention_bias", out_bias="attention_bias")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(attention=_ATTENTION_BIAS, feed_forward=FeedForward(bias="mlp_bias")),
        "mistral": Family(defaults={"num_key_value_heads": 8}),
        "qwen2": Family(attention=Attention(qkv_bias=True), defaults={"num_key_value_heads": 32}),
        "qwen3": Family(attention=_QUERY_KEY_NORMS, defaults={"num_key_value_heads": 32, "head_dim": 128}),
        "gemma2": Family(
            attention=_ATTENTION_BIAS,
            norms=SANDWICH_NORMS,
            norm_init="zeros",
            defaults={"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "pad_token_id": 0},
        ),
        "gemma3_text": Family(
            attention=_QUERY_KEY_NORMS,
            norms=SANDWICH_NORMS,
            norm_init="zeros",
            defaults={"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "pad_token_id": 0},
        ),
        "granite": Family(attention=_ATTENTION_BIAS, feed_forward=FeedForward(bias="mlp_bias")),
        "olmo2": Family(
            attention=Attention(qkv_bias="attention_bias", out_bias="attention_bias", norms="full_width"),
            norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            defaults={"pad_token_id": 1},
        ),
        "phi3": Family(
            attention=Attention(kind="packed"),
            feed_forward=FeedForward(columns=("gate_up_proj",), is_packed=True),
            defaults={"pad_token_id": 32000},
        ),
        "phi": Family(
            attention=Attention(
                out="dense",
                qkv_bias=True,
                out_bias=True,
                norms="per_head",
                norms_if="qk_layernorm",
                norm_names=("q_layernorm", "k_layernorm"),
                norm_bias=True,
            ),
            feed_forward=_PHI_MLP,
            norms=("input_layernorm",),
            norm_bias=True,
            final_norm="final_layernorm",
            head_bias=True,
        ),
        "gpt_neox": Family(
            attention=Attention(
                kind="fused", module="attention", out="dense", qkv_bias="attention_bias", out_bias="attention_bias"
            ),
            feed_forward=_NEOX_MLP,
            norm_bias=True,
            body="gpt_neox",
            embedding="embed_in",
            final_norm="final_layer_norm",
            defaults={"attention_bias": True},
        ),
        "cohere2": Family(
            attention=_ATTENTION_BIAS,
            norms=("input_layernorm",),
            defaults={"tie_word_embeddings": True, "pad_token_id": 0},
        ),
        "mixtral": Family(
            feed_forward=None,
            experts=Experts(num=("num_local_experts",), width="intermediate_size", has_router_loss=True),
            defaults={"num_key_value_heads": 8, "num_local_experts": 8},
        ),
        "qwen3_moe": Family(
            attention=_QUERY_KEY_NORMS,
            experts=Experts(
                num=("num_experts", "num_local_experts"), width="moe_intermediate_size", has_router_loss=True
            ),
            defaults={
                "num_key_value_heads": 4,
                "num_experts": 128,
                "moe_intermediate_size": 768,
                "decoder_sparse_step": 1,
            },
        ),
        "deepseek_v3": Family(
            attention=Attention(kind="latent", qkv_bias="attention_bias", out_bias="attention_bias"),
            experts=Experts(
                num=("n_routed_experts", "num_local_experts"),
                width="moe_intermediate_size",
                num_shared="n_shared_experts",
            ),
            defaults={
                "num_key_value_heads": 128,
                "n_routed_experts": 256,
                "n_shared_experts": 1,
                "moe_intermediate_size": 2048,
                "first_k_dense_replace": 3,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
                "qk_nope_head_dim": 128,
                "v_head_dim": 128,
            },
        ),
        "gpt_oss": Family(
            attention=Attention(qkv_bias="attention_bias", out_bias="attention_bias", has_sinks=True),
            feed_forward=None,
            experts=Experts(
                num=("num_local_experts",),
                width="intermediate_size",
                router="router",
                router_bias=True,
                is_interleaved=True,
                has_router_loss=True,
            ),
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 64,
                "num_local_experts": 128,
                "attention_bias": True,
            },
        ),
    }
)

BY_PLAN = (
    *("arcee", "cohere", "ernie4_5", "exaone", "exaone4", "gemma", "helium", "hyperclovax", "internlm3", "iquestcoder"),
    *("jais2", "ministral", "ministral3", "nanochat", "nemotron", "olmo", "seed_oss", "smollm3", "starcoder2"),
    "vaultgemma",
)
"""Families whose `base_model_tp_plan` says all that is needed, and that have been compared with one device."""
