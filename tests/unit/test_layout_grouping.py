"""Groups that sum bundles: within a budget for each device, whatever failures and returns have left behind."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.repartition import with_device, without_device
from tests.unit.test_layout_plan import plans
from uneven.errors import LayoutError
from uneven.layout import (
    MAX_GROUPS_PER_DEVICE,
    Band,
    LogicalAxis,
    ModelStructure,
    ParallelPlan,
    ParameterSpec,
    Shard,
    bundle_sizes,
    groups_of,
    segments_of,
)
from uneven.modelspec import parse_model

STRUCTURE = parse_model(
    {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 256,
    }
).structure
NUM_SEQUENCES = 1000


def most_groups(groups: dict[tuple[int, ...], tuple[int, ...]]) -> int:
    """Of how many groups the busiest device is part."""
    return max(Counter(device for group in set(groups.values()) for device in group).values())


def elements_sent(sizes: dict[tuple[int, ...], int], groups: dict[tuple[int, ...], tuple[int, ...]]) -> int:
    """Half of what all devices send to sum everything, in elements."""
    return sum((len(groups[members]) - 1) * size for members, size in sizes.items())


def histories(num_sequences: int) -> Iterator[tuple[ParallelPlan, bool]]:
    """Plans after 1 to 6 random failures and returns on 4 replicas of 8, and whether a device has returned."""
    whole = ParallelPlan.from_shares(STRUCTURE, [[1] * 8] * 4)
    for seed in range(num_sequences):
        draw = random.Random(seed)
        plan, gone, has_returned = whole, [], False
        for _ in range(draw.randint(1, 6)):
            if gone and draw.random() < 0.4:
                device, replica = gone.pop(draw.randrange(len(gone)))
                plan = with_device(plan, device, replica=replica)
                has_returned = True
            else:
                device = draw.choice([d for d in plan.devices if len(plan.layout_of(d).devices) > 1])
                gone.append((device, plan.replica_of(device)))
                plan = without_device(plan, device)
        yield plan, has_returned


def test_no_history_of_failures_and_returns_exceeds_the_budget(record_property) -> None:
    num_merged = num_returned = worst_before = 0
    growth = []
    for plan, has_returned in histories(NUM_SEQUENCES):
        groups = groups_of(plan)
        assert all(set(members) <= set(group) for members, group in groups.items())
        assert most_groups(groups) <= MAX_GROUPS_PER_DEVICE
        own = {members: members for members in groups}
        before = most_groups(own)
        worst_before = max(worst_before, before)
        assert (groups == own) == (before <= MAX_GROUPS_PER_DEVICE)
        if groups != own:
            num_merged += 1
            sizes = bundle_sizes(plan)
            assert groups.keys() == sizes.keys()
            growth.append(elements_sent(sizes, groups) / elements_sent(sizes, own) - 1)
        num_returned += has_returned
    record_property("merged", num_merged)
    record_property("most_groups_without_budget", worst_before)
    assert num_merged > NUM_SEQUENCES // 10
    assert num_returned > NUM_SEQUENCES // 10
    assert worst_before > 1.5 * MAX_GROUPS_PER_DEVICE
    assert sum(growth) / NUM_SEQUENCES < 0.005
    assert max(growth) < 0.1


def test_nobody_outside_of_a_bundle_contributes_to_it() -> None:
    for plan, _ in histories(20):
        groups = groups_of(plan)
        for spec in plan.structure.parameters:
            for segment in segments_of(plan, spec):
                assert set(segment.contributors) <= set(segment.members) <= set(groups[segment.members])


@settings(max_examples=100)
@given(plan=plans(), max_groups=st.integers(1, 4))
def test_any_budget_is_kept(plan: ParallelPlan, max_groups: int) -> None:
    groups = groups_of(plan, max_groups=max_groups)
    assert groups.keys() == bundle_sizes(plan).keys()
    assert all(set(members) <= set(group) for members, group in groups.items())
    assert most_groups(groups) <= max_groups
    if max_groups == 1:
        assert set(groups.values()) == {tuple(sorted(plan.devices))}


def one_axis(num_units: int, shares: list[list[float]]) -> ParallelPlan:
    spec = ParameterSpec("up.weight", (num_units, 1), Shard(0, "mlp", (Band(0, num_units, 1),)), "normal")
    return ParallelPlan.from_shares(ModelStructure("toy", {"mlp": LogicalAxis("mlp", num_units)}, (spec,)), shares)


def test_of_all_merges_the_one_that_adds_least_is_made() -> None:
    plan = one_axis(10, [[6, 4], [7, 2, 1]])
    assert bundle_sizes(plan) == {(0, 2): 6, (1, 2): 1, (1, 3): 2, (1, 4): 1}
    assert groups_of(plan, max_groups=3) == {members: members for members in bundle_sizes(plan)}
    # Device 1 merges two of its three: of one unit each (two more elements are sent), not of one and two (three).
    assert groups_of(plan, max_groups=2) == {(0, 2): (0, 2), (1, 2): (1, 2, 4), (1, 3): (1, 3), (1, 4): (1, 2, 4)}


def test_a_budget_of_none_is_refused() -> None:
    with pytest.raises(LayoutError, match="max_groups must be a whole number of at least 1, found 0"):
        groups_of(one_axis(4, [[1], [1]]), max_groups=0)
