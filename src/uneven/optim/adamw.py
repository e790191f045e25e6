"""AdamW in fp32 (fp64 for a model in fp64) over the local part of a divided model.

The same class for one rank and for many: an update needs no communication, because every element's gradient is
already the sum over all replicas.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import nn


@final
class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101) by `torch.optim.AdamW`, on master weights.

    A bf16 parameter has an fp32 master copy that is updated and then rounded; others are their own master. Weights
    of two or more dimensions decay; biases and norms do not.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.numel()}
        self._masters = {
            name: p.detach().float() if p.dtype in (torch.bfloat16, torch.float16) else p
            for name, p in self._parameters.items()
        }
        decaying = [m for m in self._masters.values() if m.ndim >= 2]
        others = [m for m in self._masters.values() if m.ndim < 2]
        groups = [
            {"params": decaying, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, foreach=True
        )

    @torch.no_grad()
    def step(self, grads: Mapping[str, torch.Tensor], *, lr: float) -> None:
        """Update every local parameter by its gradient of the same name and shape, at learning rate `lr`."""
        for name, master in self._masters.items():
            master.grad = grads[name]
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        for name, master in self._masters.items():
            master.grad = None
            parameter = self._parameters[name]
            if parameter is not master:
                parameter.copy_(master)
