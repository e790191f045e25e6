"""Models by their `config.json`: families, parameters and how each may be divided. Pure Python; never loads torch."""

from uneven.modelspec.families import EMBEDDING, FAMILIES, HEAD
from uneven.modelspec.read import (
    DEFAULT_MODEL,
    WEIGHTS,
    WEIGHTS_INDEX,
    ModelSpec,
    find_weights,
    parse_model,
    read_model,
)

__all__ = [
    "DEFAULT_MODEL",
    "EMBEDDING",
    "FAMILIES",
    "HEAD",
    "WEIGHTS",
    "WEIGHTS_INDEX",
    "ModelSpec",
    "find_weights",
    "parse_model",
    "read_model",
]
