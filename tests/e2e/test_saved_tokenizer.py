"""transformers reads a saved tokenizer and gives the same ids."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.unit.test_data_tokenizer import ODD_TEXTS, SAMPLE, write_bpe, write_json
from uneven.data import load_tokenizer


def auto_tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_transformers_reads_equal_ids_from_a_saved_byte_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("byte")
    tokenizer.save(tmp_path / "model")
    auto = auto_tokenizer(tmp_path / "model")
    assert (len(auto), auto.eos_token, auto.eos_token_id) == (257, "<|endoftext|>", 256)
    for text in ODD_TEXTS:
        if "<|endoftext|>" not in text:
            assert auto.encode(text) == tokenizer.encode(text).tolist()
            assert auto.decode(auto.encode(text)) == text


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_transformers_reads_equal_ids_beside_a_model_config(tmp_path: Path, model_type: str) -> None:
    tokenizer = load_tokenizer("byte")
    tokenizer.save(tmp_path)
    write_json(tmp_path / "config.json", {"model_type": model_type})
    auto = auto_tokenizer(tmp_path)
    text = "def f(x):\n\treturn  x  # naïve 😀"
    assert auto.encode(text, add_special_tokens=False) == tokenizer.encode(text).tolist()
    assert auto.eos_token_id == 256


def test_transformers_reads_equal_ids_from_a_saved_trained_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_bpe(tmp_path / "my.json")))
    tokenizer.save(tmp_path / "model")
    auto = auto_tokenizer(tmp_path / "model")
    assert auto.encode(SAMPLE) == tokenizer.encode(SAMPLE).tolist()
    assert auto.eos_token_id == tokenizer.eos_id == 1
