"""A stock transformers model from its configuration alone, without weights."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from uneven.errors import ModelError
from uneven.modelspec import ModelSpec


def build_model(spec: ModelSpec, *, dtype: torch.dtype) -> PreTrainedModel:
    """The undivided model on the meta device, which takes no memory; `parallelize` gives it parameters.

    Raises ModelError for a configuration that transformers refuses.
    """
    return build_stock(spec.config, dtype=dtype)


def build_stock(config: Mapping[str, Any], *, dtype: torch.dtype) -> PreTrainedModel:
    """As `build_model`, of a parsed `config.json`."""
    family = str(config["model_type"])
    settings = {key: value for key, value in config.items() if key not in ("model_type", "dtype", "torch_dtype")}
    try:
        stock_config = AutoConfig.for_model(family, **settings)
        stock_config.dtype = dtype
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(stock_config, dtype=dtype)
            for parameter in model.parameters():  # some routers ask for fp32
                parameter.data = parameter.data.to(dtype)
    except Exception as error:  # of many kinds: whatever a stock class does with a value that it can't use
        raise ModelError(f"transformers refuses this {family} configuration: {_cause(error)}") from error
    return model


def _cause(error: Exception) -> str:
    """The innermost error: its kind, since some say nothing but a key, and its words."""
    inner = error
    while isinstance(inner.__cause__, Exception):
        inner = inner.__cause__
    return f"{type(inner).__name__}: {' '.join(str(inner).split())}"
