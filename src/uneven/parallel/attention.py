"""Attention on whatever heads a rank holds: none, all, or a run that cuts through a group of shared key-value heads.

Reached through transformers' attention interface. The heads' arrangement comes with the call, from a hook on the
attention module, because it belongs to the layout and not to the module.

Shape suffixes: B batch, H query heads, K key-value heads, T tokens, S tokens attended to, E head width.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from uneven.errors import ModelError
from uneven.layout import Interval
from uneven.parallel.mappings import zero_in_graph

NAME = "uneven"
NEUTRAL: Mapping[str, Any] = MappingProxyType({"position_bias": None, "is_causal": True})
"""Arguments that some families pass, and the value (besides None) with which they ask for nothing special."""


def register_attention() -> None:
    """Make `attn_implementation="uneven"` known to transformers; repeating it changes nothing."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def queries_per_kv_head(units: tuple[Interval, ...], group: int) -> tuple[int, ...]:
    """For each key-value head that a rank holds, ascending, how many of the rank's query heads (`units`) use it.

    `group` is the model's number of query heads per key-value head.
    """
    counts: dict[int, int] = {}
    for start, stop in units:
        for query_head in range(start, stop):
            kv_head = query_head // group
            counts[kv_head] = counts.get(kv_head, 0) + 1
    return tuple(counts[kv_head] for kv_head in sorted(counts))


def repeat_kv(x_BKSE: torch.Tensor, queries_per_kv: tuple[int, ...]) -> torch.Tensor:
    """Key or value heads repeated for their query heads: (B, K, S, E) to (B, H, S, E).

    By expansion and not by index, so that the gradient is a sum in a fixed order.
    """
    if all(count == 1 for count in queries_per_kv):
        return x_BKSE
    parts = [x_BKSE[:, k : k + 1].expand(-1, count, -1, -1) for k, count in enumerate(queries_per_kv)]
    return torch.cat(parts, dim=1)


def attend(
    module: nn.Module,
    query_BHTE: torch.Tensor,
    key_BKSE: torch.Tensor,
    value_BKSE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    queries_per_kv: tuple[int, ...],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the local heads; returns (B, T, H, E) and no weights.

    `options` are transformers' own: `scaling`, `dropout`, `softcap` on the scores (Gemma 2), `s_aux` as sinks
    (GPT-OSS). Those that concern other implementations are ignored; one that would change the result is refused.
    """
    for name, neutral in NEUTRAL.items():
        if options.get(name) not in (None, neutral):
            raise ModelError(f"{type(module).__name__} passes {name}, which this attention does not understand")
    if query_BHTE.shape[1] == 0:
        shape_BTHE = (query_BHTE.shape[0], query_BHTE.shape[2], 0, value_BKSE.shape[3])
        return query_BHTE.new_zeros(shape_BTHE) + zero_in_graph(query_BHTE, key_BKSE, value_BKSE), None
    softcap, sinks = options.get("softcap"), options.get("s_aux")
    is_plain = softcap is None and sinks is None
    # Kernels read a head that equally many query heads share where it lies: 5 % less of a step than with copies.
    if not (is_plain and attention_mask is None and len(set(queries_per_kv)) == 1):
        key_BKSE, value_BKSE = repeat_kv(key_BKSE, queries_per_kv), repeat_kv(value_BKSE, queries_per_kv)
    if is_plain:
        out_BHTE = F.scaled_dot_product_attention(
            query_BHTE,
            key_BKSE,
            value_BKSE,
            attn_mask=attention_mask,
            dropout_p=options.get("dropout", 0.0),
            is_causal=attention_mask is None and query_BHTE.shape[2] > 1,
            scale=options.get("scaling"),
            enable_gqa=key_BKSE.shape[1] != query_BHTE.shape[1],
        )
    else:
        scores_BHTS = query_BHTE @ key_BKSE.transpose(2, 3) * options["scaling"]
        if softcap is not None:
            scores_BHTS = torch.tanh(scores_BHTS / softcap) * softcap
        scores_BHTS = _masked(scores_BHTS, attention_mask)
        out_BHTE = _softmax(scores_BHTS, sinks).to(query_BHTE.dtype) @ value_BKSE
    return out_BHTE.transpose(1, 2).contiguous(), None


def _masked(scores_BHTS: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Scores with those of unseen tokens at minus infinity; no mask means causal."""
    num_queries, num_keys = scores_BHTS.shape[2:]
    if mask is None:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores_BHTS.device)
        mask = mask.tril(num_keys - num_queries)
    return scores_BHTS.masked_fill(~mask, -torch.inf)


def _softmax(scores_BHTS: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    """Softmax in at least fp32; a sink takes part in it with a logit of its own for each head, and is dropped."""
    if sinks_H is not None:
        column = sinks_H.to(scores_BHTS.dtype).view(1, -1, 1, 1).expand(*scores_BHTS.shape[:3], 1)
        return F.softmax(torch.cat([scores_BHTS, column], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]
    return F.softmax(scores_BHTS, dim=-1, dtype=torch.float32)
