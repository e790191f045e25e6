"""Models by their `config.json`: families, parameters and how each may be divided. Pure Python; never loads torch."""

from uneven.modelspec.families import EMBEDDING, FAMILIES, HEAD
from uneven.modelspec.read import DEFAULT_MODEL, ModelSpec, parse_model, read_model

__all__ = ["DEFAULT_MODEL", "EMBEDDING", "FAMILIES", "HEAD", "ModelSpec", "parse_model", "read_model"]
