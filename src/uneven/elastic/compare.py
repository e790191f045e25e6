"""Whether devices that hold the same parameters still have the same bits, as they must after every step.

Hardware that computes wrongly without an error shows here: every holder of an element gets the same update, bit for
bit. A checksum of each bundle is compared between its members, and the gradient norm between all devices.
"""

import torch

from uneven.comm import Group
from uneven.elastic.difference import Difference, judge
from uneven.layout import ParallelPlan, bundles_of
from uneven.reshard import Tiles, cut

MODULUS = 9007199254740881
"""The largest prime below 2^53: sums modulo it are exact in fp64, and no flip of one bit leaves them as they are."""


def compare(tiles: Tiles, plan: ParallelPlan, *, norm: float, group: Group) -> tuple[Difference, ...]:
    """What differs, the same on every rank; called by all devices of the plan, with their parameters."""
    device = group.devices[group.rank]
    bundles = [(members, entries) for members, entries in bundles_of(plan).items() if len(members) > 1]
    sums = torch.zeros(len(bundles) + 1, group.size, dtype=torch.float64, device=group.torch_device)
    for row, (members, entries) in enumerate(bundles):
        if device in members:
            views = [view for spec, segment in entries for _, view in cut(tiles[spec.name], segment.ranges)]
            sums[row, group.rank] = sum(map(_checksum, views)) % MODULUS
    sums[-1, group.rank] = norm
    found = group.all_reduce(sums).tolist()
    everyone = tuple(group.devices)
    rows = zip([*(members for members, _ in bundles), everyone], found, strict=True)
    named = (
        judge({member: row[everyone.index(member)] for member in members}) for members, row in rows if len(members) > 1
    )
    return tuple(difference for difference in named if difference is not None)


def _checksum(view: torch.Tensor) -> int:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[view.element_size()]
    return int(view.detach().view(integers).sum(dtype=torch.int64))
