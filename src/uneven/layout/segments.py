"""Which devices must sum which gradients: the elements of each parameter grouped by the tuple of their owners.

For an element take the devices that hold it in each replica. Elements with the same devices form one segment, and
one sum over those devices is its data-parallel reduction: nothing is resharded first, whatever the layouts. A key
or value head that several devices of a replica share needs no rule of its own: each of them holds it, each has a
part of its gradient, and all of them are in the sum.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import groupby

from uneven.layout.model import ParameterSpec
from uneven.layout.partition import Interval
from uneven.layout.placement import Band, Replicate, Shard
from uneven.layout.plan import ParallelPlan

Members = tuple[int, ...]
"""Devices that hold the same elements, ascending."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements of one parameter whose gradients the same devices sum.

    `ranges` are ranges along the parameter's `dim`.
    `members` hold the elements and need their sum; `contributors`, among them, have a gradient that counts, and the
    others add zeros. Both ascend.
    """

    parameter: str
    ranges: tuple[Interval, ...]
    members: Members
    contributors: Members


def segments_of(plan: ParallelPlan, spec: ParameterSpec) -> tuple[Segment, ...]:
    """The segments of one parameter, in ascending order of their members; the same on every rank."""
    if isinstance(spec.placement, Replicate):
        everyone = tuple(sorted(plan.devices))
        leaders = tuple(sorted(replica.layout.devices[0] for replica in plan.replicas))
        counting = leaders if spec.placement.grad == "copied" else everyone
        return (Segment(spec.name, spec.whole, everyone, counting),)
    by_members: defaultdict[Members, list[Interval]] = defaultdict(list)
    for band in spec.placement.bands:
        for members, elements in _band_runs(plan, spec.placement.module, band=band):
            by_members[members].append(elements)
    return tuple(Segment(spec.name, tuple(ranges), members, members) for members, ranges in sorted(by_members.items()))


def bundles_of(plan: ParallelPlan) -> dict[Members, tuple[tuple[ParameterSpec, Segment], ...]]:
    """For each set of members their bundle: all that they hold together, segment after segment, as buffers have it.

    The order is the reverse of registration, about that in which backward finishes. It depends on the plan alone, so
    a place in a bundle means the same elements on every rank.
    """
    bundles: defaultdict[Members, list[tuple[ParameterSpec, Segment]]] = defaultdict(list)
    for spec in reversed(plan.structure.parameters):
        for segment in segments_of(plan, spec):
            bundles[segment.members].append((spec, segment))
    return {members: tuple(entries) for members, entries in sorted(bundles.items())}


def bundle_sizes(plan: ParallelPlan) -> dict[Members, int]:
    """The number of elements in each bundle of `bundles_of`, with layers that are divided alike counted once."""
    sizes: Counter[Members] = Counter()
    known: dict[Hashable, list[tuple[Members, int]]] = {}
    for spec in plan.structure.parameters:
        placement = spec.placement
        key: Hashable
        slices = spec.shape[spec.dim]
        if isinstance(placement, Shard):
            key = (tuple(replica.layout.partitions[placement.module] for replica in plan.replicas), placement.bands)
        else:
            key = (placement, slices)
        if key not in known:
            known[key] = [
                (segment.members, sum(b - a for a, b in segment.ranges)) for segment in segments_of(plan, spec)
            ]
        for members, count in known[key]:
            sizes[members] += count * (spec.num_elements // slices)
    return dict(sorted(sizes.items()))


def _band_runs(plan: ParallelPlan, module: str, *, band: Band) -> list[tuple[Members, Interval]]:
    """Maximal runs of blocks that the same devices hold, as elements along the dimension."""
    owners = list(zip(*(replica.layout.partitions[module].owners for replica in plan.replicas), strict=True))
    blocks = [frozenset(owners[block * band.group : (block + 1) * band.group]) for block in range(band.num_blocks)]
    members = {block: tuple(sorted({device for unit in block for device in unit})) for block in set(blocks)}
    runs: list[tuple[Members, Interval]] = []
    start = 0
    for holders, run in groupby(members[block] for block in blocks):
        stop = start + sum(1 for _ in run)
        runs.append((holders, band.blocks((start, stop))))
        start = stop
    return runs
