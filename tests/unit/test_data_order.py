"""The order of samples: a permutation an epoch, a pure function, the same for ever."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uneven.data import sample_index
from uneven.errors import DataError


def epoch(seed: int, num_sequences: int, *, number: int = 0) -> list[int]:
    start = number * num_sequences
    return [sample_index(start + i, seed=seed, num_sequences=num_sequences) for i in range(num_sequences)]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2000), st.integers(-(2**63), 2**64), st.integers(0, 5))
def test_each_sequence_is_read_once_an_epoch(num_sequences: int, seed: int, number: int) -> None:
    assert sorted(epoch(seed, num_sequences, number=number)) == list(range(num_sequences))


@pytest.mark.parametrize("num_sequences", range(1, 40))
def test_small_sets_are_read_once_an_epoch_too(num_sequences: int) -> None:
    assert sorted(epoch(1, num_sequences)) == list(range(num_sequences))


@given(st.integers(0, 10**15), st.integers(1, 10**12))
def test_index_stays_in_range_for_any_size(number: int, num_sequences: int) -> None:
    assert 0 <= sample_index(number, seed=0, num_sequences=num_sequences) < num_sequences


def test_epochs_seeds_and_sizes_have_orders_of_their_own() -> None:
    orders = [epoch(seed, 101, number=number) for seed in range(3) for number in range(3)]
    orders.append(epoch(0, 102)[:101])
    assert len({tuple(order) for order in orders}) == 10


def test_order_looks_random() -> None:
    """Neighbours are apart, first places vary, and half the values are above the middle in any half."""
    order = epoch(7, 1000)
    steps = [abs(b - a) for a, b in itertools.pairwise(order)]
    assert 250 < sum(steps) / len(steps) < 420  # 333 expected
    assert 200 < sum(value >= 500 for value in order[:500]) < 300
    firsts = [sample_index(number * 10, seed=3, num_sequences=10) for number in range(2000)]
    assert all(130 < firsts.count(value) < 270 for value in range(10))


def test_all_orders_of_three_occur_about_equally() -> None:
    orders = [tuple(epoch(0, 3, number=number)) for number in range(1200)]
    assert all(120 < orders.count(order) < 280 for order in set(orders))
    assert len(set(orders)) == 6


def test_order_is_the_same_in_every_version() -> None:
    assert epoch(0, 10) == [7, 3, 6, 0, 5, 2, 9, 1, 4, 8]
    assert epoch(1, 10) == [8, 1, 7, 3, 5, 9, 2, 0, 6, 4]
    assert epoch(0, 7, number=3) == [0, 5, 2, 4, 1, 6, 3]
    assert sample_index(10**12, seed=-5, num_sequences=123_456_789) == 100336603


def test_order_is_the_same_in_another_process() -> None:
    code = "from uneven.data.order import sample_index as f; print([f(i, seed=3, num_sequences=50) for i in range(50)])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(epoch(3, 50))


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(DataError, match=r"sample -1 of 5 sequences; needed is a number >= 0"):
        sample_index(-1, seed=0, num_sequences=5)
    with pytest.raises(DataError, match=r"sample 3 of 0 sequences; .* at least 1 sequence"):
        sample_index(3, seed=0, num_sequences=0)
