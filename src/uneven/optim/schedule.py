"""The learning rate as a function of the step alone."""

import math
from dataclasses import dataclass
from typing import Literal

Decay = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up over `warmup_steps` to `peak`, then decay to `floor` at `total_steps`."""

    peak: float
    floor: float
    warmup_steps: int
    total_steps: int
    decay: Decay = "cosine"

    def learning_rate(self, step: int) -> float:
        """For the update of step 1, 2, ..., `total_steps`."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.decay == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        remaining = (1 + math.cos(math.pi * progress)) / 2 if self.decay == "cosine" else 1 - progress
        return self.floor + (self.peak - self.floor) * remaining
