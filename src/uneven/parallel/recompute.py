"""Activation checkpointing: keep each layer's input only, and compute the rest again in backward.

The collectives of a layer run again as well, in the same order on every rank (Chen et al., arXiv 1604.06174).
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from uneven.errors import ModelError
from uneven.parallel.float64 import KeepFloat64


def recompute_activations(model: PreTrainedModel) -> None:
    """From now on `model` keeps no activations inside of its layers. Raises ModelError where a family can't."""
    is_double = any(parameter.dtype == torch.float64 for parameter in model.parameters())

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[object]]:
        return nullcontext(), KeepFloat64() if is_double else nullcontext()

    # The name of transformers 5.24; older versions have the second one only.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False, "context_fn": contexts})
    except ValueError as error:
        raise ModelError(f"activations of {type(model).__name__} can't be recomputed: {error}") from None
