"""What each device of a plan holds, in numbers: elements of every axis, parameters, gradient groups."""

from collections.abc import Mapping
from dataclasses import dataclass

from uneven.layout import LogicalAxis, ModelLayout, ParallelPlan, Partition, groups_of

KV_HEADS = "kv_heads"
"""Stands beside the names of axes: a key and value head has no axis, it follows a group of query heads."""


@dataclass(frozen=True, slots=True)
class Held:
    """The elements of an axis that a device holds of `total`: `least` to `most` over the modules divided along it."""

    least: int
    most: int
    total: int


@dataclass(frozen=True, slots=True)
class Holding:
    """One device: what it holds by the name of the axis, `KV_HEADS` among them, and of how many sums it is part."""

    device: int
    axes: Mapping[str, Held]
    num_parameters: int
    num_gradient_groups: int


def holdings_of(plan: ParallelPlan) -> tuple[Holding, ...]:
    """One for each device, in the order of `plan.devices`.

    Parameters held add up to more than the model where devices share a key and value head or a replicated weight.
    """
    groups = set(groups_of(plan).values())
    return tuple(
        Holding(
            device,
            _held(replica.layout, device),
            replica.layout.local_elements(device),
            sum(device in group for group in groups),
        )
        for replica in plan.replicas
        for device in replica.layout.devices
    )


def num_elements(axis: LogicalAxis, num_units: int, *, has_last: bool) -> int:
    """Elements in so many units of an axis, of which the last may be short."""
    missing = axis.num_units * axis.unit_size - axis.size if has_last else 0
    return num_units * axis.unit_size - missing


def _held(layout: ModelLayout, device: int) -> dict[str, Held]:
    found: dict[str, list[tuple[int, int]]] = {}
    groups = layout.structure.kv_groups
    for module, axis in layout.structure.axes.items():
        partition = layout.partitions[module]
        has_last = partition.owners[-1] == device
        elements = num_elements(axis, partition.count(device), has_last=has_last)
        found.setdefault(axis.name, []).append((elements, axis.size))
        if module in groups:
            num_blocks = -(-axis.num_units // groups[module])
            count = _num_blocks(partition, device, group=groups[module])
            found.setdefault(KV_HEADS, []).append((count, num_blocks))
    return {
        name: Held(
            min(count for count, _ in counts), max(count for count, _ in counts), max(size for _, size in counts)
        )
        for name, counts in found.items()
    }


def _num_blocks(partition: Partition, device: int, *, group: int) -> int:
    return len({unit // group for unit, owner in enumerate(partition.owners) if owner == device})
