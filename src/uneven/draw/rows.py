"""The rows of a plan's picture: its divided modules in order, alike layers taken together, long lists cut."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from uneven.layout import LogicalAxis, ParallelPlan, Partition
from uneven.modelspec import HEAD

# Rows of one kind, such as attention: the first ones and the last ones where there are more.
MOST_ROWS, LAST_ROWS = 10, 3


@dataclass(frozen=True, slots=True)
class Row:
    """Modules of one kind that every replica divides in the same way: `partitions[r]` is replica r's.

    `layers` are the first and the last, None outside of layers; `kv_group` is the number of query heads per key and
    value head, 1 where each has its own.
    """

    kind: str
    layers: tuple[int, int] | None
    axis: LogicalAxis
    partitions: tuple[Partition, ...]
    kv_group: int

    @property
    def name(self) -> str:
        return f"{_span(self.layers)} {self.kind}" if self.layers else self.kind

    @property
    def size(self) -> str:
        return f"{self.axis.size:,} {noun_of(self.axis)}"

    @property
    def num_kv_heads(self) -> int:
        return -(-self.axis.num_units // self.kv_group)

    def holders(self, replica: int) -> list[tuple[int, ...]]:
        """For each key and value head the devices that hold it, in the order of their query heads."""
        owners = self.partitions[replica].owners
        groups = (owners[start : start + self.kv_group] for start in range(0, len(owners), self.kv_group))
        return [tuple(dict.fromkeys(group)) for group in groups]


@dataclass(frozen=True, slots=True)
class Gap:
    """Stands for rows that were left out."""

    text: str


@dataclass(frozen=True, slots=True)
class Module:
    """A divided module by its place: its kind, and its layer if it is in one."""

    name: str
    kind: str
    layer: int | None


def noun_of(axis: LogicalAxis) -> str:
    """What the elements of an axis are called."""
    return {"heads": "heads", "mlp": "channels", "vocab": "rows", "experts": "experts"}.get(axis.name, "elements")


def rows_of(plan: ParallelPlan) -> tuple[Row | Gap, ...]:
    """Embedding, attention of all layers, mlp of all layers, head."""
    modules = [_module(name, plan.structure.axes[name]) for name in plan.structure.axes]
    kinds = list(dict.fromkeys(module.kind for module in modules))
    kinds.sort(key=lambda kind: kind == "head")
    return tuple(
        row for kind in kinds for row in _cut(list(_rows(plan, [each for each in modules if each.kind == kind])))
    )


def _module(name: str, axis: LogicalAxis) -> Module:
    in_layer = re.search(r"\.layers\.(\d+)\.(?:\w+\.)*(\w+)$", name)
    if in_layer:
        kind = "attention" if axis.name == "heads" else in_layer.group(2).removesuffix("_experts")
        return Module(name, kind, int(in_layer.group(1)))
    return Module(name, "head" if name == HEAD else "embedding", None)


def _rows(plan: ParallelPlan, modules: list[Module]) -> Iterator[Row]:
    groups = plan.structure.kv_groups

    def division(module: Module) -> tuple[LogicalAxis, tuple[Partition, ...], int]:
        partitions = tuple(replica.layout.partitions[module.name] for replica in plan.replicas)
        return plan.structure.axes[module.name], partitions, groups.get(module.name, 1)

    for (axis, partitions, kv_group), alike in itertools.groupby(modules, key=division):
        run = list(alike)
        first, last = run[0].layer, run[-1].layer
        layers = None if first is None or last is None else (first, last)
        yield Row(run[0].kind, layers, axis, partitions, kv_group)


def _cut(rows: list[Row]) -> list[Row | Gap]:
    if len(rows) <= MOST_ROWS:
        return [*rows]
    first = MOST_ROWS - LAST_ROWS
    left_out = rows[first:-LAST_ROWS]
    layers = [layer for row in left_out for layer in row.layers or ()]
    where = f"{_span((layers[0], layers[-1]))}: " if layers else ""
    gap = Gap(f"{where}{len(left_out)} more row{'s' * (len(left_out) > 1)} left out")
    return [*rows[:first], gap, *rows[-LAST_ROWS:]]


def _span(layers: tuple[int, int]) -> str:
    first, last = layers
    return f"layer {first}" if first == last else f"layers {first}-{last}"
