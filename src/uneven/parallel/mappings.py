"""The two operators at the borders of a divided module; each is the other's dual.

Megatron's f and g (Shoeybi et al., arXiv 1909.08053, section 3).
"""

from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from uneven.comm import Group


class _CopyToTP(torch.autograd.Function):
    """Forward identity, backward all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _ReduceFromTP(torch.autograd.Function):
    """Forward all-reduce, backward identity."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, group: Group) -> torch.Tensor:
        return group.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def copy_to_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`x`, the same on every rank, where a divided computation begins; its gradient is summed over the group.

    The sum takes place only where `x` requires a gradient, which must therefore be so on all ranks or on none.
    """
    # Alone there is nothing to sum: without the copies that a sum in place needs, a step is 1 to 2 % shorter.
    out: torch.Tensor = x if group.size == 1 else _CopyToTP.apply(x, group)
    return out


def reduce_from_tp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of every rank's part `x`, where a divided computation ends."""
    out: torch.Tensor = x if group.size == 1 else _ReduceFromTP.apply(x, group)
    return out


def zero_in_graph(*tensors: torch.Tensor) -> torch.Tensor:
    """Zero that depends on `tensors`: whether a result requires a gradient must not differ by rank."""
    return torch.stack([tensor.flatten()[:0].sum() for tensor in tensors]).sum()
