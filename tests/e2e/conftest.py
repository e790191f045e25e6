"""A tiny job for the command line: a model's folder and a corpus, in a folder of the test's own."""

import json
from pathlib import Path

import pytest

from tests.e2e.command import TinyJob

TINY_MODEL = {
    "model_type": "llama",
    "hidden_size": 40,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "eos_token_id": 256,
    "bos_token_id": None,
}


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(TINY_MODEL))
    (folder / "corpus").mkdir()
    for index in range(40):
        words = " ".join(f"line {index * 31 + n} of {n * n % 17}" for n in range(60))
        (folder / "corpus" / f"{index}.txt").write_text(words)
    return folder


@pytest.fixture
def tiny(tiny_files: Path, tmp_path: Path) -> TinyJob:
    return TinyJob(tiny_files, tmp_path)
