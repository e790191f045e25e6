"""Models by their `config.json`: families, parameters and how each may be divided. Pure Python; never loads torch."""

from uneven.modelspec.families import FAMILIES
from uneven.modelspec.read import (
    DEFAULT_MODEL,
    ModelSpec,
    find_weights,
    parse_model,
    read_model,
)
from uneven.modelspec.sources import Piece, Source, assemble, pieces_of, sources_of
from uneven.modelspec.stored import BytesRead, StoredTensor, StoredWeights, read_stored
from uneven.modelspec.structure import HEAD, ExpertDivision, experts_of

__all__ = [
    "DEFAULT_MODEL",
    "FAMILIES",
    "HEAD",
    "BytesRead",
    "ExpertDivision",
    "ModelSpec",
    "Piece",
    "Source",
    "StoredTensor",
    "StoredWeights",
    "assemble",
    "experts_of",
    "find_weights",
    "parse_model",
    "pieces_of",
    "read_model",
    "read_stored",
    "sources_of",
]
