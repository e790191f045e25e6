"""Models on disk."""

from uneven.checkpoint.export import export_model, gather_parameters
from uneven.checkpoint.load import load_model

__all__ = ["export_model", "gather_parameters", "load_model"]
