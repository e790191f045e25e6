"""What a checkpoint is divided into: boxes of a parameter that is seen as a matrix.

Its rows are the dimensions before the divided one, its columns the divided one and those after; all of a parameter
that is divided along dim 0, or not at all, is one row. So what a device holds are whole columns, and a shard of the
optimizer's state, which ends anywhere, at most three boxes of each slab. Loads no torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from uneven.layout import Interval, ParameterSpec, Segment, Shard, StateShard

STATE = ("value", "exp_avg", "exp_avg_sq")
"""The trained state of an element: its fp32 master, or the parameter where there is none; AdamW's moments."""
BUFFER = "buffer"
"""The kind of what belongs to a model without being trained: one row."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows and columns of one kind of number of one parameter."""

    name: str
    kind: str
    rows: Interval
    columns: Interval

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def matrix_shape(spec: ParameterSpec) -> tuple[int, int]:
    """The rows and columns of a parameter, local ones as well with the local number of columns."""
    num_rows = prod(spec.shape[: spec.placement.dim]) if isinstance(spec.placement, Shard) else 1
    return num_rows, spec.num_elements // num_rows


def held_slices(spec: ParameterSpec, kind: str, *, ranges: Sequence[Interval] | None) -> tuple[Slice, ...]:
    """Elements `ranges` of a parameter along its divided dim, None for all.

    Side by side, in this order, they are the columns of the local tensor.
    """
    num_rows, num_columns = matrix_shape(spec)
    if ranges is None or not isinstance(spec.placement, Shard):
        return (Slice(spec.name, kind, (0, num_rows), (0, num_columns)),)
    width = num_columns // spec.shape[spec.placement.dim]
    return tuple(Slice(spec.name, kind, (0, num_rows), (start * width, stop * width)) for start, stop in ranges)


def shard_slices(entries: Iterable[tuple[ParameterSpec, Segment]], shard: StateShard, *, kind: str) -> Iterator[Slice]:
    """The elements of a shard of the bundle with these `entries` (`bundles_of`), end to end in this order."""
    first = 0
    for spec, segment in entries:
        for slab in held_slices(spec, kind, ranges=segment.ranges):
            start, stop = max(shard.start - first, 0), min(shard.stop - first, slab.num_elements)
            if start < stop:
                yield from _boxes(slab, start, stop=stop)
            first += slab.num_elements


def _boxes(slab: Slice, start: int, *, stop: int) -> Iterator[Slice]:
    """Elements `start` to `stop` of a slab, row by row: a part of a row, whole rows, a part of a row."""
    width = slab.shape[1]
    while start < stop:
        row, column = divmod(start, width)
        num_rows = max((stop - start) // width, 1) if column == 0 else 1
        end = min(stop, (row + num_rows) * width)
        columns = (column, column + (end - start) // num_rows)
        yield Slice(
            slab.name,
            slab.kind,
            (slab.rows[0] + row, slab.rows[0] + row + num_rows),
            (slab.columns[0] + columns[0], slab.columns[0] + columns[1]),
        )
        start = end
