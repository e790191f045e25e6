"""Models on disk."""

from uneven.checkpoint.export import export_model, gather_parameters

__all__ = ["export_model", "gather_parameters"]
