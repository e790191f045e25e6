"""Cross entropy over a divided vocabulary; no rank ever holds whole logits.

Shape suffixes: N target positions, V local vocabulary rows.
"""

from typing import Any, final

import torch
from torch.nn import functional as F

from uneven.comm import Group
from uneven.errors import InputError
from uneven.parallel.layers import VocabRows
from uneven.parallel.router import RouterLoss

IGNORE = -100
"""A target that does not count, as in transformers."""


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Forward the loss of each position, backward softmax minus one-hot on the local rows."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, target_rows_N: torch.Tensor, is_mine_N: torch.Tensor, group: Group
    ) -> torch.Tensor:
        num_positions, num_rows = logits_NV.shape
        if num_rows:
            largest_N = logits_NV.amax(dim=1)
            target_N = logits_NV.gather(1, target_rows_N[:, None])[:, 0] * is_mine_N
        else:
            largest_N = logits_NV.new_full((num_positions,), -torch.inf)
            target_N = logits_NV.new_zeros(num_positions)
        group.all_reduce_max(largest_N)
        exponentials_NV = (logits_NV - largest_N[:, None]).exp_()
        # One message for both sums: latency, not size, is what they cost.
        sums_2N = group.all_reduce(torch.stack([exponentials_NV.sum(dim=1), target_N]))
        ctx.save_for_backward(exponentials_NV.div_(sums_2N[0][:, None]), target_rows_N, is_mine_N)
        return sums_2N[0].log() + largest_N - sums_2N[1]

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities_NV, target_rows_N, is_mine_N = ctx.saved_tensors
        grad_NV = probabilities_NV * grad_N[:, None]
        if grad_NV.shape[1]:
            grad_NV.scatter_add_(1, target_rows_N[:, None], -(grad_N * is_mine_N)[:, None])
        return grad_NV, None, None, None


@final
class VocabParallelLoss:
    """Stands in for a transformers model's `loss_function`, with the same arguments and the same result.

    Called by every rank of a tensor-parallel group with its own local logits and the same targets. With a `router`
    its balance loss is added in training, as transformers does.
    """

    def __init__(self, rows: VocabRows, group: Group, *, router: RouterLoss | None = None) -> None:
        self._rows = rows
        self._group = group
        self.router = router

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        *_: Any,
        num_items_in_batch: torch.Tensor | int | None = None,
        shift_labels: torch.Tensor | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """The summed loss over `num_items_in_batch`, in at least fp32; in evaluation without it, the mean.

        `logits` (batch, tokens, local rows). `labels` are shifted here unless `shift_labels` (batch, tokens) gives
        the targets themselves. For training, `num_items_in_batch` is the number of target tokens in the global
        batch: replicas of unlike batches then count rightly.
        """
        if shift_labels is None:
            if labels is None:
                raise InputError("the loss needs labels or shift_labels, found neither")
            shift_labels = F.pad(labels, (0, 1), value=IGNORE)[..., 1:]
        if num_items_in_batch is None and torch.is_grad_enabled():
            raise InputError(
                "training needs num_items_in_batch, the number of target tokens in the global batch: a mean over "
                "one replica's tokens would weigh replicas of unlike batches wrongly"
            )
        if isinstance(num_items_in_batch, int) and num_items_in_batch < 1:
            raise InputError(f"num_items_in_batch must be at least 1, found {num_items_in_batch}")
        targets_N = shift_labels.reshape(-1)
        is_counted_N = targets_N != IGNORE
        rows_N, is_mine_N = self._rows.lookup(targets_N.where(is_counted_N, 0))
        logits_NV = logits.flatten(0, -2)
        if logits_NV.dtype in (torch.bfloat16, torch.float16):
            logits_NV = logits_NV.float()
        losses_N = _VocabParallelCrossEntropy.apply(logits_NV, rows_N, is_mine_N, self._group)
        total = (losses_N * is_counted_N).sum()
        loss: torch.Tensor = total / (is_counted_N.sum() if num_items_in_batch is None else num_items_in_batch)
        balance = None if self.router is None else self.router.take()
        return loss if balance is None else loss + balance
