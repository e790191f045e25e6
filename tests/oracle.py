"""What one process computes with the stock transformers model: the truth that every layout is compared with."""

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from uneven.comm import Transport, World
from uneven.layout import ParallelPlan
from uneven.modelspec import ModelSpec
from uneven.parallel import KeepFloat64, build_model, fill_random, parallelize, take_ranges


def stock_model(spec: ModelSpec, *, seed: int, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The stock model, undivided, with the weights that `fill_random` gives."""
    settings = {key: value for key, value in spec.config.items() if key != "model_type"}
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(spec.family, **settings), dtype=dtype)
    stock.set_experts_implementation("eager")  # the one that computes in fp64
    for parameter in stock.parameters():
        parameter.data = parameter.data.to(dtype)
    plan = ParallelPlan.from_shares(spec.structure, [[1]])
    world = lone_world()
    layout = plan.layout_of(0)
    source = parallelize(build_model(spec, dtype=dtype), layout, world=world)
    fill_random(source, layout, spec=spec, device=0, seed=seed)
    missing = stock.load_state_dict(source.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    return stock


def lone_world() -> World:
    """A world of one device, which never communicates."""
    store = torch.distributed.HashStore()
    return World(0, [0], store=store, transport=Transport())


def call(model: PreTrainedModel, rows: np.ndarray[Any, Any], *, num_tokens: int) -> torch.Tensor:
    """The loss of token rows (n, seq_len + 1) over `num_tokens`, by the arguments that any transformers model takes."""
    tokens = torch.from_numpy(rows)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    with KeepFloat64():
        loss: torch.Tensor = model(
            input_ids=inputs, labels=targets, shift_labels=targets, num_items_in_batch=num_tokens, use_cache=False
        ).loss
    return loss


def stock_gradients(spec: ModelSpec, rows: np.ndarray[Any, Any], *, seed: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and every gradient of one process on the whole batch, fp64."""
    model = stock_model(spec, seed=seed)
    loss = call(model, rows, num_tokens=rows[:, 1:].size)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found: torch.Tensor, needed: torch.Tensor, *, scale: torch.Tensor | None = None) -> float:
    """max|a - b| / max|b|, or over max|scale| where `needed` is a part of `scale`; 0 for empty tensors."""
    assert found.shape == needed.shape
    if needed.numel() == 0:
        return 0.0
    largest = (needed if scale is None else scale).double().abs().max()
    return float((found.double() - needed.double()).abs().max() / largest)


def local_part(plan: ParallelPlan, name: str, whole: torch.Tensor, *, device: int) -> torch.Tensor:
    """What `device` holds of a whole tensor."""
    layout = plan.layout_of(device)
    return take_ranges(whole, plan.structure.parameter(name), ranges=layout.ranges(name, device))
