"""A stock transformers model from its configuration alone, without weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from uneven.errors import ModelError
from uneven.modelspec import ModelSpec


def build_model(spec: ModelSpec, *, dtype: torch.dtype) -> PreTrainedModel:
    """The undivided model on the meta device, which takes no memory; `parallelize` gives it parameters.

    Raises ModelError for a configuration that transformers refuses.
    """
    settings = {key: value for key, value in spec.config.items() if key not in ("model_type", "dtype", "torch_dtype")}
    try:
        config = AutoConfig.for_model(spec.family, **settings)
        config.dtype = dtype
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
            for parameter in model.parameters():  # some routers ask for fp32
                parameter.data = parameter.data.to(dtype)
    except Exception as error:  # of many kinds: whatever a stock class does with a value that it can't use
        raise ModelError(f"transformers refuses this {spec.family} configuration: {_cause(error)}") from error
    return model


def _cause(error: Exception) -> str:
    """The innermost error: its kind, since some say nothing but a key, and its words."""
    inner = error
    while isinstance(inner.__cause__, Exception):
        inner = inner.__cause__
    return f"{type(inner).__name__}: {' '.join(str(inner).split())}"
