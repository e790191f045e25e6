"""Which communication group sums each bundle: its own members, or more devices where groups would become too many.

A group costs threads, descriptors and, on GPUs, memory, so a device has a budget of them. Past it, sets of members
are merged into their union. The sums stay the same: whoever doesn't hold an element adds zero.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations

from uneven.layout.axis import require_whole
from uneven.layout.plan import ParallelPlan
from uneven.layout.segments import Members, bundle_sizes

MAX_GROUPS_PER_DEVICE = 16


def groups_of(plan: ParallelPlan, *, max_groups: int = MAX_GROUPS_PER_DEVICE) -> dict[Members, Members]:
    """For each set of members the group that sums what they hold; the same on every rank.

    No device is in more than `max_groups` groups. Device by device, the one in most sets first, merges are chosen
    one at a time: of two groups of the device those whose union adds least to what all devices send together.
    """
    require_whole("groups of a device", max_groups=max_groups)
    bundles = bundle_sizes(plan)
    devices = sorted({device for members in bundles for device in members})
    bits = {device: 1 << position for position, device in enumerate(devices)}
    merged = _merge({sum(bits[device] for device in members): size for members, size in bundles.items()}, max_groups)
    named = {mask: tuple(device for device, bit in bits.items() if mask & bit) for mask in {*merged, *merged.values()}}
    return {named[mask]: named[union] for mask, union in merged.items()}


def _merge(sizes: Mapping[int, int], max_groups: int) -> dict[int, int]:
    """The same for sets of devices as bits of a number, by the elements that each set holds."""
    groups = dict(sizes)
    merged = {mask: mask for mask in sizes}
    devices = [1 << position for position in range(max(sizes).bit_length())]
    for device in sorted(devices, key=lambda device: (-sum(1 for mask in groups if mask & device), device)):
        mine = {mask for mask in groups if mask & device}
        if len(mine) <= max_groups:
            continue
        costs = [(_cost(groups, pair), *pair) for pair in combinations(sorted(mine), 2)]
        heapify(costs)
        while len(mine) > max_groups:
            cost, *pair = heappop(costs)
            if not mine.issuperset(pair) or cost != _cost(groups, pair):
                continue  # since then one of the two was merged, or grew
            union = pair[0] | pair[1]
            groups[union] = groups.get(union, 0) + sum(groups.pop(mask) for mask in pair if mask != union)
            merged = {mask: union if into in pair else into for mask, into in merged.items()}
            mine = mine - set(pair) | {union}
            for other in mine - {union}:
                again = (min(union, other), max(union, other))
                heappush(costs, (_cost(groups, again), *again))
    return merged


def _cost(groups: Mapping[int, int], pair: Sequence[int]) -> int:
    """What merging two groups adds to the elements sent: each of one grows by the devices of the other."""
    size = (pair[0] | pair[1]).bit_count()
    return sum((size - mask.bit_count()) * groups[mask] for mask in pair)
