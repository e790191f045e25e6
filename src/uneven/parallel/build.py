"""A stock transformers model from its configuration alone, without weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from uneven.modelspec import ModelSpec


def build_model(spec: ModelSpec, *, dtype: torch.dtype) -> PreTrainedModel:
    """The undivided model on the meta device, which takes no memory; `parallelize` gives it parameters."""
    settings = {key: value for key, value in spec.config.items() if key not in ("model_type", "dtype", "torch_dtype")}
    config = AutoConfig.for_model(spec.family, **settings)
    config.dtype = dtype
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model
