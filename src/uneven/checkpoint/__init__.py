"""Models and training jobs on disk. What moves no tensors is usable without torch."""

from importlib import import_module
from typing import Any

PLACES = (("export_model", "export"), ("gather_parameters", "export"), ("load_model", "load"))


def __getattr__(name: str) -> Any:
    # Not at import: manifests are read by processes that should not wait for torch.
    if name not in dict(PLACES):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{dict(PLACES)[name]}"), name)
