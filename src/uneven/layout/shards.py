"""Who keeps which part of the optimizer's state: a function of the plan and the number of copies alone.

What the same devices hold (a bundle) is divided into one shard for each replica. A shard is kept in `copies`
replicas, by every device of theirs that holds its elements, so the copies are in different failure domains, and one
death never takes more than one of them. Devices of a replica that share a key and value head, or a replicated
parameter, each keep what their replica keeps: these are small, and need no exchange within the replica.
"""

from dataclasses import dataclass
from typing import Literal

from uneven.errors import PlanError
from uneven.layout.plan import ParallelPlan
from uneven.layout.segments import Members, bundle_sizes

Copies = int | Literal["all"]


@dataclass(frozen=True, slots=True)
class StateShard:
    """Elements `start` to `stop` of the bundle of `members`; `holders`, among them, keep and update their state."""

    members: Members
    start: int
    stop: int
    holders: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def transfers(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of the updated elements, for every member that isn't a holder; sources take turns."""
        others = [member for member in self.members if member not in self.holders]
        return tuple((self.holders[i % len(self.holders)], other) for i, other in enumerate(others))


def shards_of(plan: ParallelPlan, copies: Copies) -> tuple[StateShard, ...]:
    """All shards of a job, by ascending members and places; the same on every rank.

    Shard i of R replicas is kept in the replicas i, i + 1, ..., i + copies - 1 (modulo R). Where every replica keeps
    all, a bundle is one shard.
    """
    if copies != "all" and (type(copies) is not int or copies < 1):
        raise PlanError(
            f"copies of the optimizer's state: expected a whole number of at least 1 or 'all', found {copies!r}"
        )
    replicas = [replica.layout.devices for replica in plan.replicas]
    num_copies = len(replicas) if copies == "all" else min(copies, len(replicas))
    num_shards = 1 if num_copies == len(replicas) else len(replicas)
    shards = []
    for members, size in bundle_sizes(plan).items():
        for i in range(num_shards):
            keeping = [replicas[(i + k) % len(replicas)] for k in range(num_copies)]
            holders = tuple(device for devices in keeping for device in devices if device in members)
            start, stop = size * i // num_shards, size * (i + 1) // num_shards
            if start < stop:
                shards.append(StateShard(members, start, stop, holders))
    return tuple(shards)
