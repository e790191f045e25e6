"""A stock transformers model from its configuration alone, without weights."""

import torch
from huggingface_hub.errors import StrictDataclassError
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
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"transformers refuses this {spec.family} configuration: {_cause(error)}") from error
    config.dtype = dtype
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def _cause(error: Exception) -> str:
    """What was wrong, in the words of the innermost error."""
    inner = error
    while isinstance(inner.__cause__, Exception):
        inner = inner.__cause__
    return " ".join(str(inner).split())
