"""A mixture's experts on a rank that holds some of them, or a part of each.

Reached through transformers' experts interface; the router is not divided, and computes the same on every rank. What
a rank holds comes with the call, from a hook on the experts module.

Shape suffixes: N tokens, K choices of a token, D width.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from uneven.comm import Group
from uneven.parallel.mappings import copy_to_tp, reduce_from_tp, zero_in_graph

NAME = "uneven"


@final
@dataclass(frozen=True, slots=True)
class HeldExperts:
    """The experts that a rank has weights of, by their numbers in the model, ascending as they are stacked."""

    numbers: tuple[int, ...]
    group: Group


def register_experts() -> None:
    """Make `experts_implementation="uneven"` known to transformers; repeating it changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)


def run_experts(
    module: nn.Module,
    hidden_ND: torch.Tensor,
    chosen_NK: torch.Tensor,
    weights_NK: torch.Tensor,
    *,
    held: HeldExperts,
) -> torch.Tensor:
    """The weighted sum of each token's chosen experts, (N, D), summed over the tensor-parallel group."""
    hidden_ND, weights_NK = copy_to_tp(hidden_ND, held.group), copy_to_tp(weights_NK, held.group)
    out_ND = torch.zeros_like(hidden_ND) + zero_in_graph(hidden_ND, weights_NK, *module.parameters())
    for index, number in enumerate(held.numbers):
        tokens, choices = torch.where(chosen_NK == number)
        if len(tokens):
            part = _run_one(module, hidden_ND[tokens], index=index)
            out_ND = out_ND.index_add(0, tokens, (part * weights_NK[tokens, choices, None]).to(out_ND.dtype))
    return reduce_from_tp(out_ND, held.group)


def _run_one(module: nn.Module, x: torch.Tensor, *, index: int) -> torch.Tensor:
    """One expert, by the stock module's own activation; `index` is its place in the local stack."""

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)[index]
        bias = getattr(module, f"{name}_bias")[index] if module.has_bias else None
        return F.linear(x, weight.t() if module.is_transposed else weight, bias)

    return project(module._apply_gate(project(x, "gate_up_proj")), "down_proj")
