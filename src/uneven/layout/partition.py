"""Who holds each unit of an axis within one replica.

A partition is one owner per unit, so a gap or an overlap can't be written down. Shares need be neither equal nor
contiguous, and a device may hold nothing.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from uneven.errors import LayoutError
from uneven.layout.axis import require_whole

Interval = tuple[int, int]
"""Half-open: start, stop."""


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` indivisible things in proportion to `weights` by largest remainder; ties go to the earlier one."""
    if not weights or not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise LayoutError(f"can't divide {total} by the weights {list(weights)}: needed are numbers >= 0, not all 0")
    largest = max(weights)
    parts = [weight / largest for weight in weights]
    quotas = [total * part / sum(parts) for part in parts]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


@dataclass(frozen=True, slots=True)
class Partition:
    """`owners[u]` is the id of the device that holds unit u."""

    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.owners:
            raise LayoutError("a partition needs at least one unit, found none")

    @classmethod
    def from_shares(cls, num_units: int, shares: Mapping[int, float]) -> "Partition":
        """Contiguous runs in the order of `shares` (device id to positive weight), as even as whole units allow."""
        counts = apportion(num_units, list(shares.values()))
        runs = zip(shares, counts, strict=True)
        return cls(tuple(device for device, count in runs for _ in range(count)))

    def intervals(self, device: int) -> tuple[Interval, ...]:
        """The units of `device` as maximal runs, ascending."""
        found: list[Interval] = []
        unit = 0
        for owner, run in itertools.groupby(self.owners):
            length = len(list(run))
            if owner == device:
                found.append((unit, unit + length))
            unit += length
        return tuple(found)

    def count(self, device: int) -> int:
        return self.owners.count(device)

    def to_json(self) -> list[list[int]]:
        """Runs of `[device, units]`."""
        return [[owner, len(list(run))] for owner, run in itertools.groupby(self.owners)]

    @classmethod
    def from_json(cls, runs: Any, *, num_units: int, where: str) -> "Partition":
        """Of `to_json`; `where` names the place in errors."""
        if not isinstance(runs, list) or any(not isinstance(run, list) or len(run) != 2 for run in runs):
            raise LayoutError(f"{where}: expected a list of [device, units], found {runs!r}")
        for device, count in runs:
            require_whole(where, least=0, device=device)
            require_whole(where, units=count)
        total = sum(count for _, count in runs)
        if total != num_units:
            raise LayoutError(f"{where}: the partition has {total} units, its axis {num_units}")
        return cls(tuple(device for device, count in runs for _ in range(count)))
