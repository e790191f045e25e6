"""Segments: each element of a parameter has one set of devices that sum its gradient."""

from typing import Any

import pytest
from hypothesis import given, settings

from tests.unit.test_layout_plan import STRUCTURE, plans
from uneven.layout import ParallelPlan, Replicate, Segment, segments_of


@settings(max_examples=50)
@given(plan=plans())
def test_each_element_is_in_one_segment_of_all_who_hold_it(plan: ParallelPlan) -> None:
    for spec in plan.structure.parameters:
        if isinstance(spec.placement, Replicate):
            continue
        segments = segments_of(plan, spec)
        holders: dict[int, set[int]] = {}
        for device in plan.devices:
            for start, stop in plan.layout_of(device).spec_ranges(spec, device) or ():
                for element in range(start, stop):
                    holders.setdefault(element, set()).add(device)
        members = {
            element: segment.members for segment in segments for a, b in segment.ranges for element in range(a, b)
        }
        assert members == {element: tuple(sorted(found)) for element, found in holders.items()}
        assert members.keys() == set(range(spec.shape[spec.placement.dim]))
        covered = sum(stop - start for segment in segments for start, stop in segment.ranges)
        assert covered == spec.shape[spec.placement.dim]


@settings(max_examples=50)
@given(plan=plans())
def test_segments_stand_in_ascending_order_of_distinct_members(plan: ParallelPlan) -> None:
    for spec in plan.structure.parameters:
        members = [segment.members for segment in segments_of(plan, spec)]
        assert members == sorted(set(members))
        assert all(each == tuple(sorted(set(each))) for each in members)


@settings(max_examples=50)
@given(plan=plans())
def test_every_member_of_a_divided_segment_contributes_and_each_replica_has_one(plan: ParallelPlan) -> None:
    for spec in plan.structure.parameters:
        if isinstance(spec.placement, Replicate):
            continue
        for segment in segments_of(plan, spec):
            assert segment.contributors == segment.members
            assert {plan.replica_of(member) for member in segment.members} == set(range(len(plan.replicas)))


@settings(max_examples=50)
@given(plan=plans())
def test_a_copied_gradient_counts_once_in_each_replica_and_a_partial_one_everywhere(plan: ParallelPlan) -> None:
    everyone = tuple(sorted(plan.devices))
    for spec in plan.structure.parameters:
        if not isinstance(spec.placement, Replicate):
            continue
        (segment,) = segments_of(plan, spec)
        assert segment.ranges == spec.whole
        assert segment.members == everyone
        if spec.placement.grad == "partial":
            assert segment.contributors == everyone
        else:
            replicas = [plan.replica_of(device) for device in segment.contributors]
            assert sorted(replicas) == list(range(len(plan.replicas)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Six heads of two rows on 3 + 2 devices: two heads each, three heads each. 3 + 2 - 1 pieces.
        ("q.weight", [((0, 3), (0, 4)), ((1, 3), (4, 6)), ((1, 4), (6, 8)), ((2, 4), (8, 12))]),
        # Two key-value heads of three query heads: device 1 has query heads of both.
        ("k.weight", [((0, 1, 3), (0, 2)), ((1, 2, 4), (2, 4))]),
    ],
)
def test_three_and_two_devices_overlap_in_known_pieces(name: str, expected: Any) -> None:
    plan = ParallelPlan.from_shares(STRUCTURE, [[1, 1, 1], [1, 1]])
    found = segments_of(plan, STRUCTURE.parameter(name))
    assert found == tuple(Segment(name, (elements,), members, members) for members, elements in expected)
