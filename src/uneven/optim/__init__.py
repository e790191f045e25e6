"""Optimizers for divided models, and learning-rate schedules."""

from uneven.optim.adamw import AdamW
from uneven.optim.schedule import Decay, Schedule
from uneven.optim.sharded import PURPOSE, ShardedOptimizer, ShardState

__all__ = ["PURPOSE", "AdamW", "Decay", "Schedule", "ShardState", "ShardedOptimizer"]
