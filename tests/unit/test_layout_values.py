"""Axes, partitions and placements: who holds what, for any owners."""

import itertools
import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.errors import LayoutError
from uneven.layout import Band, LogicalAxis, Partition, Replicate, Shard, apportion

owners_of_units = st.lists(st.integers(0, 5), min_size=1, max_size=60).map(tuple)
weights = st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any)


# apportion


@given(total=st.integers(0, 10_000), weights=weights)
def test_apportioned_counts_add_up_and_stay_within_one_of_their_quota(total: int, weights: list[int]) -> None:
    counts = apportion(total, weights)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - Fraction(total * weight, sum(weights))) < 1
        assert count >= 0


@given(total=st.integers(0, 1000), weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
def test_apportioned_counts_add_up_for_fractional_weights(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1 + 1e-9


@given(total=st.integers(0, 1000), weights=weights, factor=st.integers(1, 50))
def test_only_the_ratio_of_weights_counts(total: int, weights: list[int], factor: int) -> None:
    assert sum(apportion(total, [factor * weight for weight in weights])) == total
    power_of_two = [float(weight) * 8 for weight in weights]
    assert apportion(total, power_of_two) == apportion(total, weights)


@pytest.mark.parametrize(
    ("total", "weights", "counts"),
    [
        (7, [1, 1, 1], [3, 2, 2]),
        (8, [4, 3, 1], [4, 3, 1]),
        (1, [1, 1], [1, 0]),
        (5, [0, 2, 0], [0, 5, 0]),
        (10, [1, 2.5], [3, 7]),
    ],
)
def test_ties_go_to_the_earlier_one(total: int, weights: list[float], counts: list[int]) -> None:
    assert apportion(total, weights) == counts


@pytest.mark.parametrize(
    "weights", [[], [0, 0], [1, -1], [0.0], [float("nan")], [1.0, float("nan")], [float("inf"), 1.0]]
)
def test_weights_that_give_no_ratio_are_refused(weights: list[float]) -> None:
    with pytest.raises(LayoutError, match="can't divide 8 by the weights"):
        apportion(8, weights)


# Partition


@given(owners=owners_of_units)
def test_intervals_and_counts_agree_with_the_owners(owners: tuple[int, ...]) -> None:
    partition = Partition(owners)
    for device in range(6):
        intervals = partition.intervals(device)
        units = [unit for start, stop in intervals for unit in range(start, stop)]
        assert units == [unit for unit, owner in enumerate(owners) if owner == device]
        assert partition.count(device) == len(units)
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(intervals))


@given(owners=owners_of_units)
def test_a_partition_survives_json(owners: tuple[int, ...]) -> None:
    partition = Partition(owners)
    text = json.dumps(partition.to_json())
    assert Partition.from_json(json.loads(text), num_units=len(owners), where="here") == partition


@given(
    num_units=st.integers(1, 200),
    shares=st.dictionaries(st.integers(0, 40), st.integers(1, 9), min_size=1, max_size=8),
)
def test_shares_give_contiguous_runs_in_the_order_of_the_devices(num_units: int, shares: dict[int, int]) -> None:
    partition = Partition.from_shares(num_units, shares)
    assert len(partition.owners) == num_units
    runs = [device for device, _ in partition.to_json()]
    assert runs == [device for device in shares if device in runs]
    for device, share in shares.items():
        assert abs(partition.count(device) - Fraction(num_units * share, sum(shares.values()))) < 1


def test_a_partition_of_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="a partition needs at least one unit, found none"):
        Partition(())


@pytest.mark.parametrize(
    "runs",
    [None, 3, "ab", {}, [3], [[0]], [[0, 1, 2]], [[0, 0]], [[0, -1]], [[-1, 3]], [[0, 1.0]], [["0", 1]], [[True, 1]]],
)
def test_runs_that_are_no_runs_are_refused_with_their_place(runs: object) -> None:
    with pytest.raises(LayoutError, match=r"^here: .*found"):
        Partition.from_json(runs, num_units=1, where="here")


@pytest.mark.parametrize("runs", [[], [[0, 3]], [[0, 4], [1, 1]], [[0, 10**15]]])
def test_runs_of_another_number_of_units_are_refused(runs: list[list[int]]) -> None:
    total = sum(count for _, count in runs)
    with pytest.raises(LayoutError, match=f"here: the partition has {total} units, its axis 4"):
        Partition.from_json(runs, num_units=4, where="here")


# Axes


@given(size=st.integers(1, 500), unit_size=st.integers(1, 100))
def test_units_cover_an_axis_and_the_last_may_be_short(size: int, unit_size: int) -> None:
    num_units = LogicalAxis("mlp", size, unit_size).num_units
    assert (num_units - 1) * unit_size < size <= num_units * unit_size


@pytest.mark.parametrize(
    ("size", "unit_size", "found"),
    [(0, 1, "size"), (-4, 1, "size"), (8, 0, "unit_size"), (8, -2, "unit_size"), (2.5, 1, "size"), ("8", 1, "size")],
)
def test_an_axis_of_no_size_is_refused(size: int, unit_size: int, found: str) -> None:
    value = {"size": size, "unit_size": unit_size}[found]
    message = f"axis 'mlp': {found} must be a whole number of at least 1, found {value!r}"
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        LogicalAxis("mlp", size, unit_size)


@pytest.mark.parametrize("change", [{"block": 0}, {"group": 0}, {"size": 0}, {"offset": -1}, {"block": 1.5}])
def test_a_band_of_no_size_is_refused(change: dict[str, int]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(LayoutError, match=rf"band: {name} must be a whole number of at least \d, found {value}"):
        Band(**{"offset": 0, "size": 8, "block": 2, "group": 1} | change)


# Bands and shards


@st.composite
def shards(draw) -> tuple[Shard, tuple[int, ...]]:
    """Up to three bands, one after the other, whose blocks serve groups of units; and owners of the units."""
    owners = draw(owners_of_units)
    group = draw(st.integers(1, 4))
    num_blocks = -(-len(owners) // group)
    bands, offset = [], 0
    for _ in range(draw(st.integers(1, 3))):
        block = draw(st.integers(1, 6))
        short = draw(st.integers(0, block - 1))
        size = num_blocks * block - short
        bands.append(Band(offset, size, block, group))
        offset += size
    return Shard(0, "mlp", tuple(bands)), owners


@given(case=shards())
def test_ranges_of_all_devices_cover_each_element(case: tuple[Shard, tuple[int, ...]]) -> None:
    """Exactly once without groups; with them an element is held by each device that has a unit of its group."""
    shard, owners = case
    partition = Partition(owners)
    size = sum(band.size for band in shard.bands)
    holders: list[set[int]] = [set() for _ in range(size)]
    for device in range(6):
        ranges = shard.ranges(partition.intervals(device))
        elements = [element for start, stop in ranges for element in range(start, stop)]
        assert elements == sorted(set(elements))
        assert all(stop > start for start, stop in ranges)
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(ranges))
        for element in elements:
            holders[element].add(device)
    for band in shard.bands:
        for element in range(band.size):
            first = element // band.block * band.group
            assert holders[band.offset + element] == set(owners[first : first + band.group])


def test_a_fused_qkv_of_heads_gives_runs_of_three_head_widths() -> None:
    shard = Shard(0, "attention", (Band(0, 4 * 3 * 8, 3 * 8),))
    assert shard.ranges([(0, 1), (3, 4)]) == ((0, 24), (72, 96))


def test_a_packed_gate_and_up_gives_a_run_in_each_band() -> None:
    shard = Shard(0, "mlp", (Band(0, 10, 4), Band(10, 10, 4)))
    assert shard.ranges([(1, 3)]) == ((4, 10), (14, 20))
    assert shard.ranges([(0, 3)]) == ((0, 20),)
    assert shard.ranges([]) == ()


def test_a_shared_head_is_held_by_every_device_of_its_group() -> None:
    key_value = Shard(0, "attention", (Band(0, 16, 8, group=3),))
    assert key_value.ranges([(0, 2)]) == ((0, 8),)
    assert key_value.ranges([(2, 4)]) == ((0, 16),)
    assert key_value.ranges([(0, 1), (2, 3), (5, 6)]) == ((0, 16),)


def test_a_replicated_gradient_is_copied_or_partial() -> None:
    with pytest.raises(LayoutError, match="a replicated parameter's gradient is 'copied' or 'partial', found 'mean'"):
        Replicate("mean")
