"""AdamW's update of flat runs of elements, each element by itself: every holder of an element gets the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw


class Strip(NamedTuple):
    """Elements, in tensors of one shape and precision; `step` counts their updates so far."""

    values: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: int
    decays: bool


@dataclass(frozen=True, slots=True)
class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), by the arithmetic of `torch.optim.AdamW`."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def update(self, strips: Sequence[Strip], *, lr: float) -> None:
        """Change values and moments in place, at learning rate `lr`."""
        for decays in (True, False):
            chosen = [strip for strip in strips if strip.decays == decays]
            adamw(
                [strip.values for strip in chosen],
                [strip.gradient for strip in chosen],
                [strip.exp_avg for strip in chosen],
                [strip.exp_avg_sq for strip in chosen],
                [],
                [torch.tensor(float(strip.step)) for strip in chosen],
                foreach=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=self.weight_decay if decays else 0.0,
                eps=self.eps,
                maximize=False,
            )
