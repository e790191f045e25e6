"""A GGUF as a plain Hugging Face folder, by transformers' own reader.

A GGUF is quantized, and training needs numbers that can move: every weight becomes the fp32 number that the file
stands for. The reader leaves out, without a word, tensors that it has no name for; counting numbers finds that.
"""

import contextlib
import io
import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from uneven.errors import ModelError


def convert_gguf(file: Path, folder: Path) -> None:
    """Write configuration, weights in fp32 and tokenizer of `file` into `folder`, which appears when it is whole.

    Holds the model in memory once. Raises ModelError for what transformers can't read, or reads in part.
    """
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        draft.mkdir(parents=True)
        _write(file, draft)
        with contextlib.suppress(FileExistsError):  # or, another process was faster
            draft.rename(folder)
    except OSError as error:
        raise ModelError(f"{file}: can't be converted into {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(file: Path, folder: Path) -> None:
    try:
        num_elements = sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)
        config: Any = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        # Its progress bar would stand in the way of the caller's display.
        with contextlib.redirect_stderr(io.StringIO()):
            tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
            tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # of many kinds: whatever a reader does with a file that it can't use
        text = " ".join(str(error).split())
        raise ModelError(
            f"{file}: transformers can't read this GGUF of {file.stat().st_size:,} bytes, which may be cut short, or "
            f"of a kind that it does not know: {type(error).__name__}: {text}"
        ) from None
    num_read = sum(tensor.numel() for tensor in tensors.values())
    num_needed = sum(parameter.numel() for parameter in model.parameters())
    if not num_elements == num_read == num_needed:
        raise ModelError(
            f"{file}: holds {num_elements:,} numbers, of which transformers reads {num_read:,} for a "
            f"{config.model_type} model of {num_needed:,} parameters; these must be equal, or the model would be "
            f"another one (scaled rotary embeddings and biases are known to be left out)"
        )
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop_foreign_tokens(folder / "tokenizer.json", vocab=config.vocab_size)
    tensors = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone


def _drop_foreign_tokens(file: Path, *, vocab: int) -> None:
    """Drop what transformers adds to a vocabulary without it, <|endoftext|>: the model has no embedding for it."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab]
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
