"""Divide a stock transformers model in place, as a layout says.

Column-parallel projections are narrowed, row-parallel ones, the embedding and norms over a divided width are
replaced, a hook on the parent of each divided computation begins it, and the loss is told of the divided vocabulary.
Nothing else is touched.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from uneven.comm import Group, World
from uneven.errors import LayoutError
from uneven.layout import Interval, ModelLayout, ParameterSpec, Shard
from uneven.modelspec import experts_of, parse_model
from uneven.parallel import attention, experts
from uneven.parallel.describe import describe
from uneven.parallel.layers import DividedRMSNorm, RowParallelLinear, VocabParallelEmbedding, VocabRows
from uneven.parallel.loss import VocabParallelLoss
from uneven.parallel.mappings import copy_to_tp
from uneven.parallel.router import find_router_loss


def parallelize(model: PreTrainedModel, layout: ModelLayout, *, world: World) -> PreTrainedModel:
    """Keep of `model` what this rank holds under `layout`; returns it. Called by every rank of the replica.

    `model` is whole, with the same weights on every rank, or on the meta device; then its parameters are left
    uninitialised (`fill_random` or a loader fills them). Names of parameters stay. Raises LayoutError, before
    anything is changed, if the layout does not describe this model.
    """
    _check_same_model(model, layout)
    group = world.group(layout.devices, purpose="tp")
    attention.register_attention()
    model.set_attn_implementation(attention.NAME)
    for spec in layout.structure.parameters:
        _narrow(model, spec, layout=layout, world=world)
    _restore_buffers(model, world.torch_device)
    kv_groups, stacks = layout.structure.kv_groups, experts_of(layout.structure)
    for module_name, axis in layout.structure.axes.items():
        units = layout.partitions[module_name].intervals(world.device)
        module = model.get_submodule(module_name)
        if axis.name == "vocab":
            _divide_vocab(model, module_name, layout=layout, device=world.device, group=group)
        elif axis.name == "heads":
            queries = attention.queries_per_kv_head(units, kv_groups[module_name])
            _count_heads(module, num_heads=sum(queries), num_kv_heads=len(queries))
            module.register_forward_pre_hook(_begin(group, {"queries_per_kv": queries}), with_kwargs=True)
        elif module_name in stacks:
            held = units if stacks[module_name] == "whole" else ((0, module.down_proj.shape[0]),)
            _divide_experts(model, module, held=experts.HeldExperts(_members(held), group))
        else:
            module.register_forward_pre_hook(_begin(group, {}), with_kwargs=True)
    for spec in layout.structure.parameters:
        _replace(model, spec, layout=layout, world=world)
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
    spec = parse_model(
        model.config.to_dict(),
        where=f"the configuration of this {type(model).__name__}",
        experts=next(iter(experts_of(layout.structure).values()), None),
        by_plan=lambda config: (config, describe(model)),
    )
    if spec.structure != layout.structure:
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
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if isinstance(module, nn.Embedding) or not buffers:
            continue
        if any(buffer.is_meta for buffer in buffers.values()):
            rebuild: Callable[..., nn.Module] = type(module)
            buffers = dict(rebuild(config=model.config).named_buffers(recurse=False))
        for name, buffer in buffers.items():
            setattr(module, name, buffer.to(device))


def _divide_vocab(model: PreTrainedModel, module_name: str, *, layout: ModelLayout, device: int, group: Group) -> None:
    """Divide an embedding, and the head and loss that are tied to it or have a partition of their own."""
    module = model.get_submodule(module_name)
    ranges = layout.ranges(f"{module_name}.weight", device) or ()
    rows = VocabRows(ranges, model.config.vocab_size, device=module.weight.device)
    head = model.get_output_embeddings()
    if isinstance(module, nn.Embedding):
        model.set_submodule(module_name, VocabParallelEmbedding(module, rows, group=group))
        if not model.config.tie_word_embeddings:
            return
        head.weight = module.weight
        head.out_features = module.weight.shape[0]
    head.register_forward_pre_hook(_begin(group, {}), with_kwargs=True)
    model.loss_function = VocabParallelLoss(rows, group, router=find_router_loss(model))


def _count_heads(module: nn.Module, *, num_heads: int, num_kv_heads: int) -> None:
    """Tell an attention module that cuts a packed projection by its numbers of heads how many are here."""
    if hasattr(module, "qkv_proj"):
        module.config = copy(module.config)
        module.config.num_attention_heads = num_heads
        module.num_key_value_heads = num_kv_heads


def _divide_experts(model: PreTrainedModel, module: nn.Module, *, held: experts.HeldExperts) -> None:
    experts.register_experts()
    model.set_experts_implementation(experts.NAME)
    module.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"held": held}), with_kwargs=True)


def _members(intervals: Sequence[Interval]) -> tuple[int, ...]:
    return tuple(number for start, stop in intervals for number in range(start, stop))


def _replace(model: PreTrainedModel, spec: ParameterSpec, *, layout: ModelLayout, world: World) -> None:
    """Put a module of ours in the place of a row-parallel projection, or of a norm over a divided width."""
    if not isinstance(spec.placement, Shard) or not spec.name.endswith(".weight"):
        return
    module_name = spec.name.removesuffix(".weight")
    module = model.get_submodule(module_name)
    group = world.group(layout.devices, purpose="tp")
    if spec.placement.dim == 1:
        model.set_submodule(module_name, RowParallelLinear(module.weight, module.bias, group=group))
    elif len(spec.shape) == 1:
        norm = DividedRMSNorm(
            module.weight,
            _parts(spec, layout=layout, world=world),
            full_width=spec.shape[0],
            eps=module.variance_epsilon,
            group=group,
        )
        model.set_submodule(module_name, norm)


def _parts(spec: ParameterSpec, *, layout: ModelLayout, world: World) -> torch.Tensor:
    """For each local element of a 1-D parameter, one over the number of devices of the replica that hold it."""
    num_holders = torch.zeros(spec.shape, dtype=torch.float64)
    for device in layout.devices:
        for start, stop in layout.spec_ranges(spec, device) or ():
            num_holders[start:stop] += 1
    return take_ranges(1 / num_holders, spec, ranges=layout.spec_ranges(spec, world.device)).to(world.torch_device)


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
