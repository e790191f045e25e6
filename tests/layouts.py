"""Layouts that parity is tested on: degrees, worlds of unlike replicas, and partitions that no formula gives."""

from collections.abc import Callable

from uneven.layout import LogicalAxis, ModelLayout, ModelStructure, ParallelPlan, Partition, ReplicaPlan

WORLDS: dict[str, list[list[float]]] = {
    "1": [[1]],
    "2": [[1, 1]],
    "3": [[1, 1, 1]],
    "4": [[1, 1, 1, 1]],
    "2:1:1": [[2, 1, 1]],
    "2+1": [[1, 1], [1]],
    "4+3": [[1, 1, 1, 1], [1, 1, 1]],
    "3+2+1 unequal": [[3, 1, 2], [1, 2.5], [1]],
}


def custom_layout(
    structure: ModelStructure, devices: tuple[int, ...], owner: Callable[[str, LogicalAxis, int], int]
) -> ModelLayout:
    """A layout in which `owner(module, axis, unit)` gives the position in `devices` that holds a unit."""
    partitions = {
        module: Partition(tuple(devices[owner(module, axis, unit)] for unit in range(axis.num_units)))
        for module, axis in structure.axes.items()
    }
    return ModelLayout(structure, devices, partitions)


def _none_for_one(position: int, kind: str) -> Callable[[str, LogicalAxis, int], int]:
    """Three devices, of which `position` holds nothing of the axis `kind`; of experts where they take its place."""
    kinds = ("mlp", "experts") if kind == "mlp" else (kind,)

    def owner(module: str, axis: LogicalAxis, unit: int) -> int:
        if axis.name not in kinds:
            return unit * 3 // axis.num_units
        others = [p for p in range(3) if p != position]
        return others[unit * 2 // axis.num_units]

    return owner


def _interleaved(_: str, __: LogicalAxis, unit: int) -> int:
    return (unit * 7 + unit // 5) % 3


def _other_in_each_layer(module: str, axis: LogicalAxis, unit: int) -> int:
    layer = int(module.split(".")[2]) if ".layers." in module else 0
    if layer == 0:
        return min(2, unit * 4 // axis.num_units)
    return (2, 0, 0, 1)[unit * 4 // axis.num_units]


SPECIAL: dict[str, Callable[[str, LogicalAxis, int], int]] = {
    "no heads on the first": _none_for_one(0, "heads"),
    "no heads on the last": _none_for_one(2, "heads"),
    "no channels on the middle": _none_for_one(1, "mlp"),
    "no rows on the first": _none_for_one(0, "vocab"),
    "no rows on the last": _none_for_one(2, "vocab"),
    "interleaved": _interleaved,
    "another in each layer": _other_in_each_layer,
}


def special_plan(structure: ModelStructure, name: str) -> ParallelPlan:
    """Three devices arranged as SPECIAL says, beside an even replica of two that takes fewer samples."""
    special = custom_layout(structure, (0, 1, 2), SPECIAL[name])
    even = ParallelPlan.from_shares(structure, [[1, 1, 1], [1, 1]]).replicas[1].layout
    return ParallelPlan((ReplicaPlan(special, 4), ReplicaPlan(even, 1)))
