"""The learning rate of each step: warm-up, decay, floor."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.optim.schedule import Decay, Schedule

DECAYS: tuple[Decay, ...] = ("cosine", "linear", "constant")


def rates(schedule: Schedule) -> list[float]:
    return [schedule.learning_rate(step) for step in range(1, schedule.total_steps + 1)]


@pytest.mark.parametrize("decay", DECAYS)
def test_warm_up_is_linear_from_the_first_step_to_the_peak(decay: Decay) -> None:
    schedule = Schedule(peak=0.4, floor=0.1, warmup_steps=4, total_steps=12, decay=decay)
    assert rates(schedule)[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert schedule.learning_rate(4) == 0.4


def test_cosine_passes_the_middle_half_way_and_ends_at_the_floor() -> None:
    schedule = Schedule(peak=0.9, floor=0.1, warmup_steps=2, total_steps=10)
    assert schedule.learning_rate(6) == pytest.approx(0.5)
    assert schedule.learning_rate(4) == pytest.approx(0.1 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert schedule.learning_rate(10) == pytest.approx(0.1)


def test_linear_falls_by_equal_steps_to_the_floor() -> None:
    schedule = Schedule(peak=0.5, floor=0.1, warmup_steps=0, total_steps=4, decay="linear")
    assert rates(schedule) == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_constant_stays_at_the_peak() -> None:
    schedule = Schedule(peak=0.5, floor=0.1, warmup_steps=2, total_steps=5, decay="constant")
    assert rates(schedule) == [0.25, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_steps_beyond_the_last_stay_at_the_floor(decay: Decay) -> None:
    schedule = Schedule(peak=0.5, floor=0.1, warmup_steps=2, total_steps=5, decay=decay)
    assert [schedule.learning_rate(step) for step in (5, 6, 1000)] == pytest.approx([0.1, 0.1, 0.1])


def test_a_training_that_is_all_warm_up_ends_at_its_peak() -> None:
    schedule = Schedule(peak=0.3, floor=0.0, warmup_steps=3, total_steps=3)
    assert rates(schedule) == pytest.approx([0.1, 0.2, 0.3])


@given(
    decay=st.sampled_from(DECAYS),
    warmup_steps=st.integers(0, 30),
    decay_steps=st.integers(0, 60),
    peak=st.floats(1e-6, 1.0),
    ratio=st.floats(0.0, 1.0),
)
def test_rates_rise_then_fall_between_floor_and_peak(
    decay: Decay, warmup_steps: int, decay_steps: int, peak: float, ratio: float
) -> None:
    floor = ratio * peak
    schedule = Schedule(peak, floor, warmup_steps, warmup_steps + decay_steps, decay)
    found = rates(schedule)
    rising, falling = found[:warmup_steps], found[warmup_steps:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rising)
    assert all(floor * (1 - 1e-12) <= rate <= peak * (1 + 1e-12) for rate in falling)
