"""Shards of the optimizer's state, and the bundles and slabs that they are cut from."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_layout_plan import STRUCTURE, plans
from uneven.errors import PlanError
from uneven.layout import ParallelPlan, Shard, StateShard, bundle_sizes, bundles_of, shards_of, slabs_of

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
            if not isinstance(spec.placement, Shard):
                continue
            held = [row for start, stop in layout.spec_ranges(spec, device) for row in range(start, stop)]
            found = [held[slab.start : slab.start + slab.shape[slab.dim]] for slab in slabs]
            assert found == [list(range(*each)) for each in segment.ranges]


@settings(max_examples=100)
@given(plan=plans(), copies=COPIES)
def test_shards_cover_each_bundle_and_lie_in_as_many_replicas_as_there_are_copies(plan: Any, copies: Any) -> None:
    shards = shards_of(plan, copies)
    wanted = len(plan.replicas) if copies == "all" else min(copies, len(plan.replicas))
    for members, size in bundle_sizes(plan).items():
        mine = [shard for shard in shards if shard.members == members]
        ends = [end for shard in mine for end in (shard.start, shard.stop)]
        assert ends == sorted(ends)
        assert ends[1:-1:2] == ends[2::2]
        assert (ends[0], ends[-1]) == (0, size)
        sizes = [shard.num_elements for shard in mine]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        for shard in mine:
            replicas = {plan.replica_of(holder) for holder in shard.holders}
            assert len(replicas) == wanted
            assert set(shard.holders) == {member for member in members if plan.replica_of(member) in replicas}


@settings(max_examples=100)
@given(plan=plans(), copies=COPIES)
def test_whoever_does_not_keep_a_shard_gets_it_once_from_a_holder(plan: Any, copies: Any) -> None:
    for shard in shards_of(plan, copies):
        transfers = shard.transfers()
        assert sorted(to for _, to in transfers) == sorted(set(shard.members) - set(shard.holders))
        loads = [sum(source == holder for source, _ in transfers) for holder in shard.holders]
        assert sum(loads) == len(transfers)
        assert max(loads) - min(loads) <= 1


def test_three_replicas_keep_two_of_three_shards_each() -> None:
    plan = ParallelPlan.from_shares(STRUCTURE, [[1], [1], [1]])
    size = sum(spec.num_elements for spec in STRUCTURE.parameters)
    assert size == 149
    assert shards_of(plan, 2) == (
        StateShard((0, 1, 2), 0, 49, (0, 1)),
        StateShard((0, 1, 2), 49, 99, (1, 2)),
        StateShard((0, 1, 2), 99, 149, (2, 0)),
    )
    assert [shard.transfers() for shard in shards_of(plan, 2)] == [((0, 2),), ((1, 0),), ((2, 1),)]
    assert shards_of(plan, 3) == shards_of(plan, 9) == shards_of(plan, "all")
    assert shards_of(plan, "all") == (StateShard((0, 1, 2), 0, 149, (0, 1, 2)),)


def test_two_replicas_keep_everything_in_both() -> None:
    plan = ParallelPlan.from_shares(STRUCTURE, [[1, 1, 1], [1, 1]])
    shards = shards_of(plan, 2)
    assert [shard.members for shard in shards] == list(bundle_sizes(plan))
    assert all(shard.holders == shard.members and not shard.transfers() for shard in shards)


@pytest.mark.parametrize("copies", [0, -1, 1.0, True, "some", None])
def test_copies_are_a_whole_number_or_all(copies: Any) -> None:
    plan = ParallelPlan.from_shares(STRUCTURE, [[1], [1]])
    with pytest.raises(PlanError, match=f"at least 1 or 'all', found {copies!r}"):
        shards_of(plan, copies)
