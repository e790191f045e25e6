"""What of a job is compared between hosts: contents, and not where they lie."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from uneven.config import load_config
from uneven.modelspec import DEFAULT_MODEL
from uneven.train.fingerprint import data_fingerprint, design_fingerprint
from uneven.train.job import design_job, prepare_job


def design(**flags: Any) -> dict[str, str]:
    return design_fingerprint(design_job(load_config(None, flags=flags)))


def write_model(folder: Path, *, weights: bytes | None = None) -> Path:
    folder.mkdir()
    shutil.copy(DEFAULT_MODEL, folder / "config.json")
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_places_do_not_count(tmp_path: Path) -> None:
    here, there = (write_model(tmp_path / name) for name in ("here", "there"))
    assert design(model=here) == design(model=there, **{"data.cache": tmp_path, "launch.threads": 3})


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ({"train.lr": 0.5}, {"train.lr"}),
        ({"seed": 7}, {"seed"}),
        ({"parallel.replicas": [1, 2]}, {"plan"}),
        ({"parallel.replicas": [2, 1]}, set()),  # which is the default
        ({"launch.backend": "gloo"}, {"launch.backend"}),
    ],
)
def test_settings_and_plans_count(flags: dict[str, Any], keys: set[str]) -> None:
    found, needed = design(**flags), design()
    assert {key for key in needed if found[key] != needed[key]} == keys


def test_a_model_counts_by_its_contents(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    found, needed = design(model=other), design()
    assert {key for key in needed if found[key] != needed[key]} == {"model"}


@pytest.mark.parametrize("change", [0, -1])
def test_weights_count_by_both_ends_of_their_files(tmp_path: Path, change: int) -> None:
    content = bytearray(3 * 2**20)
    first = design(model=write_model(tmp_path / "first", weights=content))
    assert first == design(model=write_model(tmp_path / "same", weights=content))
    content[change] = 1
    second = design(model=write_model(tmp_path / "second", weights=content))
    assert {key for key in first if first[key] != second[key]} == {"weights"}


def test_data_count_by_their_contents(tmp_path: Path) -> None:
    def data(name: str, text: str) -> dict[str, str]:
        (tmp_path / name).write_text(text * 1000)
        flags = {"data.paths": [str(tmp_path / name)], "data.cache": tmp_path / "cache"}
        return data_fingerprint(prepare_job(design_job(load_config(None, flags=flags))))

    assert data("a.txt", "some words ") == data("b.txt", "some words ")
    assert data("a.txt", "some words ").items().isdisjoint(data("c.txt", "other words ").items())
