"""Which devices must sum which gradients: the elements of each parameter grouped by the tuple of their owners.

For an element take the devices that hold it in each replica. Elements with the same devices form one segment, and
one sum over those devices is its data-parallel reduction: nothing is resharded first, whatever the layouts. A key
or value head that several devices of a replica share needs no rule of its own: each of them holds it, each has a
part of its gradient, and all of them are in the sum.
"""

from collections import defaultdict
from dataclasses import dataclass

from uneven.layout.model import ParameterSpec
from uneven.layout.partition import Interval
from uneven.layout.placement import Band, Replicate
from uneven.layout.plan import ParallelPlan


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements of one parameter whose gradients the same devices sum.

    `ranges` are element ranges along the divided dimension, None for the whole of a replicated parameter.
    `members` hold the elements and need their sum; `contributors`, among them, have a gradient that counts, and the
    others add zeros. Both ascend.
    """

    parameter: str
    ranges: tuple[Interval, ...] | None
    members: tuple[int, ...]
    contributors: tuple[int, ...]


def segments_of(plan: ParallelPlan, spec: ParameterSpec) -> tuple[Segment, ...]:
    """The segments of one parameter, in ascending order of their members; the same on every rank."""
    if isinstance(spec.placement, Replicate):
        everyone = tuple(sorted(plan.devices))
        leaders = tuple(sorted(replica.layout.devices[0] for replica in plan.replicas))
        counting = leaders if spec.placement.grad == "copied" else everyone
        return (Segment(spec.name, None, everyone, counting),)
    by_members: defaultdict[tuple[int, ...], list[Interval]] = defaultdict(list)
    for band in spec.placement.bands:
        for members, elements in _band_runs(plan, spec.placement.module, band=band):
            by_members[members].append(elements)
    return tuple(Segment(spec.name, tuple(ranges), members, members) for members, ranges in sorted(by_members.items()))


def _band_runs(plan: ParallelPlan, module: str, *, band: Band) -> list[tuple[tuple[int, ...], Interval]]:
    """Maximal runs of blocks that the same devices hold, as elements along the dimension."""
    owners = [replica.layout.partitions[module].owners for replica in plan.replicas]
    runs: list[tuple[tuple[int, ...], Interval]] = []
    for block in range(band.num_blocks):
        units = slice(block * band.group, (block + 1) * band.group)
        members = tuple(sorted({device for replica in owners for device in replica[units]}))
        start = runs.pop()[1][0] if runs and runs[-1][0] == members else block
        runs.append((members, (start, block + 1)))
    return [(members, band.blocks(blocks)) for members, blocks in runs]
