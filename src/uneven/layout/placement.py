"""How a parameter's elements follow the units of an axis.

One description serves every weight of the families: along one dimension lie one or more bands, and in each band
unit u has a block of elements. A fused QKV has one band with a block of three head widths, a packed `[gate|up]` two
bands, three packed projections three bands, key and value heads a block shared by a group of query heads.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from uneven.errors import LayoutError
from uneven.layout.axis import require_whole
from uneven.layout.partition import Interval


@dataclass(frozen=True, slots=True)
class Band:
    """Unit u covers elements `[offset + u // group * block, ... + block)`, cut at `offset + size`."""

    offset: int
    size: int
    block: int
    group: int = 1

    def __post_init__(self) -> None:
        require_whole("band", size=self.size, block=self.block, group=self.group)
        require_whole("band", least=0, offset=self.offset)

    @property
    def num_blocks(self) -> int:
        return -(-self.size // self.block)

    def elements(self, units: Interval) -> Interval:
        """The elements along the dimension that a run of units covers."""
        first, last = units[0] // self.group, (units[1] - 1) // self.group
        return self.blocks((first, last + 1))

    def blocks(self, blocks: Interval) -> Interval:
        """The elements along the dimension that a run of blocks covers."""
        start, stop = blocks
        return self.offset + min(start * self.block, self.size), self.offset + min(stop * self.block, self.size)


@dataclass(frozen=True, slots=True)
class Shard:
    """Divided along `dim` as the units of `module` are; `module` names an axis and a partition of the layout."""

    dim: int
    module: str
    bands: tuple[Band, ...]

    def ranges(self, intervals: Iterable[Interval]) -> tuple[Interval, ...]:
        """Element ranges along `dim` for runs of units: disjoint, in band order, ascending within a band."""
        intervals = tuple(intervals)
        found: list[Interval] = []
        for band in self.bands:
            for units in intervals:
                start, stop = band.elements(units)
                if found and found[-1][0] <= start <= found[-1][1]:
                    start = found.pop()[0]
                if stop > start:
                    found.append((start, stop))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Held whole by every device.

    `copied`: each device of a replica computes the same whole gradient, so one of them counts.
    `partial`: each device computes a part of the gradient, so all of them add up.
    """

    grad: Literal["copied", "partial"] = "copied"

    def __post_init__(self) -> None:
        if self.grad not in ("copied", "partial"):
            raise LayoutError(f"a replicated parameter's gradient is 'copied' or 'partial', found {self.grad!r}")


Placement = Shard | Replicate
