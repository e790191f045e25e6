"""Who keeps which part of the optimizer's state: a function of the plan and the number of copies alone.

What the same devices hold (a bundle) is divided into one shard for each replica. A shard is kept in `copies`
replicas, by every device of theirs that holds its elements, so the copies are in different failure domains, and one
death never takes more than one of them. Devices of a replica that share a key and value head, or a replicated
parameter, each keep what their replica keeps: these are small, and need no exchange within the replica.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from uneven.errors import PlanError
from uneven.layout.model import ParameterSpec
from uneven.layout.plan import ParallelPlan
from uneven.layout.ranges import Ranges, length
from uneven.layout.segments import Members, bundles_of

Copies = int | Literal["all"]


@dataclass(frozen=True, slots=True)
class StateShard:
    """Parts of the segments of a bundle, in its order, each as ranges along its parameter's `dim`.

    `members` hold the elements; `holders`, among them, keep and update their state.
    """

    members: Members
    holders: tuple[int, ...]
    parts: tuple[tuple[ParameterSpec, Ranges], ...]

    @property
    def num_elements(self) -> int:
        return sum(spec.count(ranges) for spec, ranges in self.parts)


def shards_of(plan: ParallelPlan, copies: Copies) -> tuple[StateShard, ...]:
    """All shards of a job, by ascending members; the same on every rank.

    Shard i of R replicas is kept in the replicas i, i + 1, ..., i + copies - 1 (modulo R), and has an Rth of each
    segment. Where every replica keeps all, a bundle is one shard.
    """
    if copies != "all" and (type(copies) is not int or copies < 1):
        raise PlanError(
            f"copies of the optimizer's state: expected a whole number of at least 1 or 'all', found {copies!r}"
        )
    replicas = [replica.layout.devices for replica in plan.replicas]
    num_copies = len(replicas) if copies == "all" else min(copies, len(replicas))
    num_shards = 1 if num_copies == len(replicas) else len(replicas)
    shards = []
    for members, entries in bundles_of(plan).items():
        parts: list[list[tuple[ParameterSpec, Ranges]]] = [[] for _ in range(num_shards)]
        for number, (spec, segment) in enumerate(entries):
            for own, ranges in zip(parts, _divide(segment.ranges, num_shards, turn=number), strict=True):
                if ranges:
                    own.append((spec, ranges))
        for i, own in enumerate(parts):
            keeping = [replicas[(i + k) % len(replicas)] for k in range(num_copies)]
            holders = tuple(device for devices in keeping for device in devices if device in members)
            if own:
                shards.append(StateShard(members, holders, tuple(own)))
    return tuple(shards)


def _divide(ranges: Ranges, num_parts: int, *, turn: int) -> Iterator[Ranges]:
    """Ranges in consecutive parts that differ by one slice at most; which ones are larger changes with `turn`."""
    total = length(ranges)
    cuts = [(total * i + turn % num_parts) // num_parts for i in range(num_parts + 1)]
    return (_span(ranges, first=first, last=last) for first, last in pairwise(cuts))


def _span(ranges: Sequence[tuple[int, int]], *, first: int, last: int) -> Ranges:
    """The slices from number `first` to `last` of some ranges."""
    found = []
    for start, stop in ranges:
        size = stop - start
        if first < size and last > 0:
            found.append((start + max(first, 0), start + min(last, size)))
        first, last = first - size, last - size
    return tuple(part for part in found if part[0] < part[1])
