"""The modules that take a stock one's place: row-parallel projection, vocabulary-parallel embedding, divided norm.

A column-parallel projection needs none: it is a stock `nn.Linear` with fewer outputs.

Shape suffixes: B batch, T tokens, D width, V local vocabulary rows, F local channels.
"""

from typing import final

import torch
from torch import nn
from torch.nn import functional as F

from uneven.comm import Group
from uneven.layout import Interval
from uneven.parallel.mappings import copy_to_tp, reduce_from_tp


@final
class RowParallelLinear(nn.Module):
    """`y = x W' + b`, with `x` and the columns of W divided: the parts are summed, then the bias is added once.

    `weight` (full_out_features, local_in_features), `bias` (full_out_features,) or None.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = reduce_from_tp(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias


@final
class VocabRows:
    """Which local row, if any, a token id has on this rank."""

    def __init__(self, ranges: tuple[Interval, ...], vocab_size: int, *, device: torch.device) -> None:
        local_row = torch.full((vocab_size,), -1, dtype=torch.long)
        first = 0
        for start, stop in ranges:
            local_row[start:stop] = torch.arange(first, first + stop - start)
            first += stop - start
        self._local_row = local_row.to(device)

    def lookup(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Local rows of `ids`, 0 where another rank holds the row, and whether this rank holds it; shapes of `ids`."""
        # Not by subscript, which would take a negative id for one from the end.
        rows = self._local_row.index_select(0, ids.flatten()).view(ids.shape)
        return rows.clamp(min=0), rows >= 0

    def row(self, token: int) -> int | None:
        """The local row of one token id, None if another rank holds it."""
        row = int(self._local_row[token])
        return row if row >= 0 else None


@final
class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are divided; each rank looks up its own, and the parts are summed.

    `weight` (local rows V, D). Of the stock embedding it keeps the padding row, which gets no gradient, and the
    factor by which some families scale the result.
    """

    def __init__(self, stock: nn.Embedding, rows: VocabRows, *, group: Group) -> None:
        super().__init__()
        self.weight = stock.weight
        self.rows = rows
        self.group = group
        self.padding_row = None if stock.padding_idx is None else rows.row(stock.padding_idx)
        scale: float | None = getattr(stock, "scalar_embed_scale", None)
        # Rounded to the weights' precision first, as the stock modules do.
        self.scale = 1.0 if scale is None else float(torch.tensor(scale, dtype=stock.weight.dtype))

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        if self.weight.shape[0] == 0:
            # Zero, but in the graph of the weight: whether the result requires a gradient must not differ by rank.
            x_BTD = self.weight.sum() + self.weight.new_zeros(*ids_BT.shape, self.weight.shape[1])
        else:
            rows_BT, is_mine_BT = self.rows.lookup(ids_BT)
            x_BTD = F.embedding(rows_BT, self.weight, self.padding_row) * is_mine_BT.unsqueeze(-1)
        x_BTD = reduce_from_tp(x_BTD, self.group)
        return x_BTD if self.scale == 1.0 else x_BTD * self.scale


@final
class DividedRMSNorm(nn.Module):
    """RMSNorm over a width that is divided: `y = w x / sqrt(mean(x^2) + eps)`, the mean over all devices' channels.

    `weight` (F,). `parts` (F,) is one over the number of devices that hold a channel, so that shared key-value heads
    count once.
    """

    def __init__(self, weight: nn.Parameter, parts: torch.Tensor, *, full_width: int, eps: float, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("parts", parts.to(torch.promote_types(weight.dtype, torch.float32)), persistent=False)
        self.full_width = full_width
        self.eps = eps
        self.group = group

    def forward(self, x_BTF: torch.Tensor) -> torch.Tensor:
        wide_BTF = x_BTF.to(torch.float32)
        square_BT1 = (wide_BTF.square() * self.parts).sum(-1, keepdim=True)
        # Each rank uses the sum for its own channels: its gradient is a sum over the ranks as well.
        square_BT1 = copy_to_tp(reduce_from_tp(square_BT1, self.group), self.group)
        wide_BTF = wide_BTF * torch.rsqrt(square_BT1 / self.full_width + self.eps)
        return (self.weight * wide_BTF).to(x_BTF.dtype)
