"""Optimizers for divided models, and learning-rate schedules."""

from uneven.optim.adamw import AdamW
from uneven.optim.schedule import Decay, Schedule

__all__ = ["AdamW", "Decay", "Schedule"]
