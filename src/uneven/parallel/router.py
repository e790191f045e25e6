"""The balance loss of mixtures of experts, exact over the global batch although it is no sum over samples.

Loss = E sum_e f_e p_e, where f_e is the fraction of choices that fell on expert e and p_e the mean probability that
the router gave it, both over all tokens of all layers (Switch Transformer, Fedus et al., arXiv 2101.03961, section
2.2, as in transformers' `load_balancing_loss_func`). The f_e are constants to the gradient. With the global f_e and
the global number of tokens the loss is a sum over tokens, so that each micro-batch of each replica adds its part:
the choices are counted first, in a pass without gradients, and summed over the replicas.

Shape suffixes: N tokens, E experts.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from uneven.comm import Group
from uneven.errors import InputError
from uneven.modelspec import FAMILIES


@final
class RouterLoss:
    """Hears the routers of one model during its forward passes. `per_token` is the number of choices of a token."""

    def __init__(self, model: nn.Module, routers: list[nn.Module], *, weight: float, per_token: int) -> None:
        self._weight = weight
        self._num_experts = routers[0].weight.shape[0]
        self._device = routers[0].weight.device
        self._per_token = per_token
        self._logits: list[torch.Tensor] = []
        self._counts: torch.Tensor | None = None
        self._fractions: torch.Tensor | None = None
        # Not only when they are taken: a checkpointed layer's router speaks again in backward.
        model.register_forward_pre_hook(lambda *_: self._logits.clear())
        for router in routers:
            router.register_forward_hook(self._hear)

    def count(self, forward: Callable[[], Any], *, group: Group, is_counted: bool) -> None:
        """Count the choices of the global batch: `forward` makes this rank's forward passes over its samples.

        Called by every rank of `group`, all ranks of the job, before a step. `is_counted`: of the ranks that see the
        same samples only one counts.
        """
        self._counts = torch.zeros(self._num_experts + 1, dtype=torch.float64)
        with torch.no_grad():
            forward()
        counts, self._counts = self._counts, None
        # Choices of each expert, and last the number of tokens, each once for every layer.
        counts = group.all_reduce(counts.to(self._device) * is_counted)
        self._fractions = counts[:-1] / counts[-1] / counts[-1]

    def take(self) -> torch.Tensor | None:
        """This forward pass's part of the loss; None without gradients, in evaluation and while counting."""
        logits, self._logits = self._logits, []
        if not logits:
            return None
        if self._fractions is None:
            raise InputError(
                "the balance loss of experts needs the choices of the whole batch: call RouterLoss.count before a step"
            )
        sums_E = torch.stack([F.softmax(each_NE, dim=-1, dtype=torch.float32).sum(0) for each_NE in logits]).sum(0)
        return self._weight * self._num_experts * (self._fractions.to(sums_E.dtype) * sums_E).sum()

    def _hear(self, *call: Any) -> None:
        """A forward hook: the router, its arguments, and its output, which begins with the logits."""
        logits_NE = call[-1][0]
        if self._counts is None:
            if torch.is_grad_enabled():
                self._logits.append(logits_NE)
            return
        chosen = F.softmax(logits_NE, dim=-1).topk(self._per_token, dim=-1).indices.flatten()
        self._counts[:-1] += torch.bincount(chosen, minlength=self._num_experts).cpu()
        self._counts[-1] += len(logits_NE)


def find_router_loss(model: PreTrainedModel) -> RouterLoss | None:
    """The balance loss of a model whose configuration asks for one, which from now on leaves it to us; else None."""
    config = model.config
    family = FAMILIES.get(config.model_type)
    if (
        family is None
        or family.experts is None
        or not family.experts.has_router_loss
        or not config.output_router_logits
    ):
        return None
    config.output_router_logits = False
    name = f".mlp.{family.experts.router}"
    routers = [module for path, module in model.named_modules() if path.endswith(name)]
    return RouterLoss(model, routers, weight=config.router_aux_loss_coef, per_token=config.num_experts_per_tok)
