"""Divide a stock transformers model in place, as a layout says.

Column-parallel projections are narrowed, row-parallel ones and the embedding are replaced, a hook on the parent of
each divided computation begins it, and the loss is told of the divided vocabulary. Nothing else is touched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from uneven.comm import Group, World
from uneven.errors import LayoutError
from uneven.layout import Interval, ModelLayout, ParameterSpec, Shard
from uneven.modelspec import parse_model
from uneven.parallel.attention import NAME, queries_per_kv_head, register_attention
from uneven.parallel.layers import RowParallelLinear, VocabParallelEmbedding, VocabRows
from uneven.parallel.loss import VocabParallelLoss
from uneven.parallel.mappings import copy_to_tp


def parallelize(model: PreTrainedModel, layout: ModelLayout, *, world: World) -> PreTrainedModel:
    """Keep of `model` what this rank holds under `layout`; returns it. Called by every rank of the replica.

    `model` is whole, with the same weights on every rank, or on the meta device; then its parameters are left
    uninitialised (`fill_random` or a loader fills them). Names of parameters stay. Raises LayoutError, before
    anything is changed, if the layout does not describe this model.
    """
    _check_same_model(model, layout)
    device = world.device
    group = world.group(layout.devices, purpose="tp")
    register_attention()
    model.set_attn_implementation(NAME)
    for spec in layout.structure.parameters:
        _narrow(model, spec, layout=layout, world=world)
    _restore_buffers(model, world.torch_device)
    for module_name, axis in layout.structure.axes.items():
        if axis.name == "vocab":
            _divide_vocab(model, module_name, layout=layout, device=device, group=group)
        else:
            units = layout.partitions[module_name].intervals(device)
            extra = {} if axis.name == "mlp" else {"queries_per_kv": _queries_per_kv(layout, module_name, units=units)}
            model.get_submodule(module_name).register_forward_pre_hook(_begin(group, extra), with_kwargs=True)
    _replace_row_parallel(model, layout, group=group)
    return model


def _check_same_model(model: PreTrainedModel, layout: ModelLayout) -> None:
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    needed = {spec.name: spec.shape for spec in layout.structure.parameters}
    for name in [*needed, *found]:
        if found.get(name) != needed.get(name):
            raise LayoutError(
                f"the layout does not describe this {type(model).__name__}: parameter {name} has shape "
                f"{found.get(name, 'none (not in the model)')}, the layout says {needed.get(name, 'no such parameter')}"
            )
    if parse_model(model.config.to_dict(), where=f"the configuration of this {type(model).__name__}").structure != (
        layout.structure
    ):
        raise LayoutError(
            f"the layout does not describe this {type(model).__name__}: the shapes agree, but its configuration groups "
            f"heads or units otherwise than the layout's {layout.structure.family} model"
        )


def _narrow(model: PreTrainedModel, spec: ParameterSpec, *, layout: ModelLayout, world: World) -> None:
    """Put this rank's slice in the place of a whole parameter."""
    module_name, _, attribute = spec.name.rpartition(".")
    module = model.get_submodule(module_name)
    whole: nn.Parameter = getattr(module, attribute)
    if whole.is_meta:
        shape = layout.local_shape(spec, world.device)
        local = torch.empty(shape, dtype=whole.dtype, device=world.torch_device)
    else:
        local = take_ranges(whole.detach(), spec, ranges=layout.spec_ranges(spec, world.device)).to(world.torch_device)
    setattr(module, attribute, nn.Parameter(local))
    if isinstance(module, nn.Linear) and attribute == "weight":
        module.out_features, module.in_features = local.shape


def take_ranges(whole: torch.Tensor, spec: ParameterSpec, *, ranges: Sequence[Interval] | None) -> torch.Tensor:
    """A copy of the elements `ranges` of a whole parameter along its divided dimension; all of it for None."""
    if ranges is None or not isinstance(spec.placement, Shard):
        return whole.clone()
    dim = spec.placement.dim
    parts = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0).clone()


def _restore_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute again the constants (rotary frequencies) that a model on the meta device lacks; move the others."""
    for name, module in list(model.named_modules()):
        buffers = list(module.buffers(recurse=False))
        if any(buffer.is_meta for buffer in buffers):
            rebuild: Callable[..., nn.Module] = type(module)
            model.set_submodule(name, rebuild(config=model.config).to(device))
        elif buffers:
            module.to(device)


def _divide_vocab(model: PreTrainedModel, module_name: str, *, layout: ModelLayout, device: int, group: Group) -> None:
    """Divide an embedding, and the head and loss that are tied to it or have a partition of their own."""
    module = model.get_submodule(module_name)
    ranges = layout.ranges(f"{module_name}.weight", device) or ()
    rows = VocabRows(ranges, model.config.vocab_size, device=next(module.parameters()).device)
    head = model.get_output_embeddings()
    if isinstance(module, nn.Embedding):
        embedding = VocabParallelEmbedding(module.weight, rows, group=group, padding_id=module.padding_idx)
        model.set_submodule(module_name, embedding)
        if not model.config.tie_word_embeddings:
            return
        head.weight = module.weight
        head.out_features = module.weight.shape[0]
    head.register_forward_pre_hook(_begin(group, {}), with_kwargs=True)
    model.loss_function = VocabParallelLoss(rows, group)


def _queries_per_kv(layout: ModelLayout, module_name: str, *, units: tuple[Interval, ...]) -> tuple[int, ...]:
    placement = layout.structure.parameter(f"{module_name}.k_proj.weight").placement
    assert isinstance(placement, Shard)
    return queries_per_kv_head(units, placement.bands[0])


def _replace_row_parallel(model: PreTrainedModel, layout: ModelLayout, *, group: Group) -> None:
    for spec in layout.structure.parameters:
        if isinstance(spec.placement, Shard) and spec.placement.dim == 1:
            module_name = spec.name.removesuffix(".weight")
            module = model.get_submodule(module_name)
            model.set_submodule(module_name, RowParallelLinear(module.weight, module.bias, group=group))


Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def _begin(group: Group, extra: dict[str, Any]) -> Hook:
    """A forward pre-hook: the hidden states enter a divided computation, `extra` arguments go with them."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (copy_to_tp(args[0], group), *args[1:]), kwargs | extra
        return args, kwargs | extra | {"hidden_states": copy_to_tp(kwargs["hidden_states"], group)}

    return hook
