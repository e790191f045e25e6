"""A GGUF becomes a Hugging Face folder once, with the numbers that it stands for, and training goes on from there."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoTokenizer

from tests.e2e.command import TinyJob, load
from tests.gguf_file import TEMPLATE, write_tiny_gguf
from uneven.errors import ModelError
from uneven.train.origin import find_model

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
    "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
}


def find(file: Path, cache: Path) -> tuple[Path, list[str]]:
    """The converted folder, and what was announced."""
    said: list[str] = []
    return find_model(file, cache=cache, announce=said.append), said


def test_a_gguf_is_converted_once_whatever_it_is_called(tmp_path: Path) -> None:
    file, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    tokens = write_tiny_gguf(file)
    folder, said = find(file, cache)
    assert said == [f"converting {file}, once, into {folder}"]
    model = load(folder)
    for tensor in GGUFReader(file).tensors:
        if tensor.name in NAMES:
            needed = torch.from_numpy(np.copy(dequantize(tensor.data, tensor.tensor_type)))
            assert torch.equal(model.get_parameter(NAMES[tensor.name]), needed), tensor.name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(tokens)
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("</s>", TEMPLATE)
    moved = shutil.move(file, tmp_path / "moved.gguf")
    assert find(moved, cache) == (folder, [])
    write_tiny_gguf(file, has_scaled_rope=True)
    with pytest.raises(ModelError):
        find(file, cache)
    assert list((cache / "models").iterdir()) == [folder], "a refused one leaves nothing"


def test_training_goes_on_from_a_gguf(tiny: TinyJob) -> None:
    write_tiny_gguf(tiny.folder / "tiny.gguf")
    result = tiny.train("--replicas", "2,1", model="tiny.gguf", eval__reload=True)
    assert result.returncode == 0, result.stderr
    assert "converting tiny.gguf, once, into " in result.stdout
    summary = tiny.summary()
    assert summary["reloaded_heldout_loss"] == pytest.approx(summary["heldout_loss"], rel=1e-5)
    assert AutoTokenizer.from_pretrained(tiny.folder / "run/model").chat_template == TEMPLATE
