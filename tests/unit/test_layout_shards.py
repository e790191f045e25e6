"""Shards of the optimizer's state, and the bundles and slabs that they are cut from."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_layout_plan import STRUCTURE, plans
from uneven.errors import PlanError
from uneven.layout import (
    ParallelPlan,
    bundle_sizes,
    bundles_of,
    common,
    length,
    parameters_held,
    shards_of,
    slabs_of,
    states_held,
    transfers,
    union,
    without,
)

COPIES = st.one_of(st.integers(1, 4), st.just("all"))


@settings(max_examples=50)
@given(plan=plans())
def test_bundles_hold_every_element_of_every_device_once(plan: ParallelPlan) -> None:
    bundles = bundles_of(plan)
    assert bundle_sizes(plan) == {
        members: sum(spec.count(segment.ranges) for spec, segment in entries) for members, entries in bundles.items()
    }
    for device in plan.devices:
        held = sum(size for members, size in bundle_sizes(plan).items() if device in members)
        assert held == plan.layout_of(device).local_elements(device)


@settings(max_examples=50)
@given(plan=plans())
def test_slabs_are_a_local_tensor_cut_in_pieces(plan: ParallelPlan) -> None:
    for device, (members, entries) in itertools.product(plan.devices, bundles_of(plan).items()):
        if device not in members:
            continue
        layout = plan.layout_of(device)
        for spec, segment in entries:
            slabs = slabs_of(spec, segment, layout=layout, device=device)
            assert sum(slab.num_elements for slab in slabs) == spec.count(segment.ranges)
            held = [row for start, stop in layout.held(spec, device) for row in range(start, stop)]
            assert [slab.elements for slab in slabs] == list(segment.ranges)
            found = [held[slab.start : slab.start + slab.shape[slab.dim]] for slab in slabs]
            assert found == [list(range(*each)) for each in segment.ranges]


@settings(max_examples=100)
@given(plan=plans(), copies=COPIES)
def test_shards_cover_each_segment_and_lie_in_as_many_replicas_as_there_are_copies(plan: Any, copies: Any) -> None:
    shards = shards_of(plan, copies)
    wanted = len(plan.replicas) if copies == "all" else min(copies, len(plan.replicas))
    num_parts = 1 if wanted == len(plan.replicas) else len(plan.replicas)
    for members, entries in bundles_of(plan).items():
        mine = [shard for shard in shards if shard.members == members]
        assert sum(shard.num_elements for shard in mine) == bundle_sizes(plan)[members]
        for spec, segment in entries:
            parts = [common(ranges, segment.ranges) for shard in mine for s, ranges in shard.parts if s == spec]
            assert union(each for part in parts for each in part) == union(segment.ranges)
            sizes = [length(part) for part in parts] + [0] * (num_parts - len(parts))
            assert sum(sizes) == length(segment.ranges)
            assert max(sizes) - min(sizes) <= 1
        for shard in mine:
            replicas = {plan.replica_of(holder) for holder in shard.holders}
            assert len(replicas) == wanted
            assert set(shard.holders) == {member for member in members if plan.replica_of(member) in replicas}


@settings(max_examples=100)
@given(plan=plans(), copies=COPIES)
def test_whoever_does_not_keep_a_shard_gets_it_once_from_a_holder(plan: Any, copies: Any) -> None:
    kept = states_held(plan, shards_of(plan, copies))
    moves = transfers(kept, parameters_held(plan), structure=plan.structure)
    for device, held in parameters_held(plan).items():
        for spec in plan.structure.parameters:
            came = [move for move in moves if (move.destination, move.spec) == (device, spec)]
            assert all(without(move.ranges, kept[move.source].get(spec.name, ())) == () for move in came)
            parts = [*kept[device].get(spec.name, ()), *(part for move in came for part in move.ranges)]
            assert union(parts) == held[spec.name]
            assert length(parts) == length(held[spec.name])


def test_three_replicas_keep_two_of_three_shards_each() -> None:
    plan = ParallelPlan.from_shares(STRUCTURE, [[1], [1], [1]])
    shards = shards_of(plan, 2)
    assert [(shard.members, shard.holders, shard.num_elements) for shard in shards] == [
        ((0, 1, 2), (0, 1), 48),
        ((0, 1, 2), (1, 2), 50),
        ((0, 1, 2), (2, 0), 51),
    ]
    assert [{spec.name: ranges for spec, ranges in shard.parts}["down.weight"] for shard in shards] == [
        ((0, 7),),
        ((7, 14),),
        ((14, 22),),
    ]
    assert shards_of(plan, 3) == shards_of(plan, 9) == shards_of(plan, "all")
    (whole,) = shards_of(plan, "all")
    assert (whole.num_elements, whole.holders) == (149, (0, 1, 2))
    assert whole.parts == tuple((spec, spec.whole) for spec in reversed(STRUCTURE.parameters))


def test_two_replicas_keep_everything_in_both() -> None:
    plan = ParallelPlan.from_shares(STRUCTURE, [[1, 1, 1], [1, 1]])
    shards = shards_of(plan, 2)
    assert [shard.members for shard in shards] == list(bundle_sizes(plan))
    assert all(shard.holders == shard.members for shard in shards)


@pytest.mark.parametrize("copies", [0, -1, 1.0, True, "some", None])
def test_copies_are_a_whole_number_or_all(copies: Any) -> None:
    plan = ParallelPlan.from_shares(STRUCTURE, [[1], [1]])
    with pytest.raises(PlanError, match=f"at least 1 or 'all', found {copies!r}"):
        shards_of(plan, copies)
