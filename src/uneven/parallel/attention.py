"""Attention on whatever heads a rank holds: none, all, or a run that cuts through a group of shared key-value heads.

Reached through transformers' attention interface. The heads' arrangement comes with the call, from a hook on the
attention module, because it belongs to the layout and not to the module.

Shape suffixes: B batch, H query heads, K key-value heads, T tokens, E head width.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from uneven.layout import Band, Interval

NAME = "uneven"


def register_attention() -> None:
    """Make `attn_implementation="uneven"` known to transformers; repeating it changes nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def queries_per_kv_head(units: tuple[Interval, ...], key_band: Band) -> tuple[int, ...]:
    """For each key-value head that a rank holds, ascending, how many of the rank's query heads (`units`) use it."""
    counts: dict[int, int] = {}
    for start, stop in units:
        for query_head in range(start, stop):
            kv_head = query_head // key_band.group
            counts[kv_head] = counts.get(kv_head, 0) + 1
    return tuple(counts[kv_head] for kv_head in sorted(counts))


def repeat_kv(x_BKTE: torch.Tensor, queries_per_kv: tuple[int, ...]) -> torch.Tensor:
    """Key or value heads repeated for their query heads: (B, K, T, E) to (B, H, T, E).

    By expansion and not by index, so that the gradient is a sum in a fixed order.
    """
    if all(count == 1 for count in queries_per_kv):
        return x_BKTE
    parts = [x_BKTE[:, k : k + 1].expand(-1, count, -1, -1) for k, count in enumerate(queries_per_kv)]
    return torch.cat(parts, dim=1)


def attend(
    module: nn.Module,
    query_BHTE: torch.Tensor,
    key_BKTE: torch.Tensor,
    value_BKTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    queries_per_kv: tuple[int, ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention over the local heads; returns (B, T, H, E) and no weights.

    transformers calls it with its own arguments; those that concern other implementations are ignored.
    """
    if query_BHTE.shape[1] == 0:
        return query_BHTE.transpose(1, 2), None
    out_BHTE = F.scaled_dot_product_attention(
        query_BHTE,
        repeat_kv(key_BKTE, queries_per_kv),
        repeat_kv(value_BKTE, queries_per_kv),
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None and query_BHTE.shape[2] > 1,
        scale=scaling,
    )
    return out_BHTE.transpose(1, 2).contiguous(), None
