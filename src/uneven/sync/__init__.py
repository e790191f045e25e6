"""Gradient synchronisation between replicas of unlike layouts."""

from uneven.sync.buckets import PURPOSE
from uneven.sync.reducer import Gradients, GradReducer

__all__ = ["PURPOSE", "GradReducer", "Gradients"]
