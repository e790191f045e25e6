"""Models by their `config.json`: families, parameters and how each may be divided. Pure Python; never loads torch."""

from uneven.modelspec.families import FAMILIES
from uneven.modelspec.read import (
    DEFAULT_MODEL,
    WEIGHTS,
    WEIGHTS_INDEX,
    ModelSpec,
    find_weights,
    parse_model,
    read_model,
)
from uneven.modelspec.structure import HEAD, ExpertDivision

__all__ = [
    "DEFAULT_MODEL",
    "FAMILIES",
    "HEAD",
    "WEIGHTS",
    "WEIGHTS_INDEX",
    "ExpertDivision",
    "ModelSpec",
    "find_weights",
    "parse_model",
    "read_model",
]
