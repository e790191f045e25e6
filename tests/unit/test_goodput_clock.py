"""A rank's own account of its time, by a simulated clock of whole seconds: exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uneven.errors import GoodputError
from uneven.goodput import KINDS, DeviceClock


def nonzero(clock, at):
    return {kind: seconds for kind, seconds in clock.totals(at).items() if seconds}


def stepping_clock():
    """Start-up till 10, then busy for 5 s and waiting for 4 s till 19."""
    clock = DeviceClock(0.0)
    clock.switch("useful", 10.0)
    clock.switch("communication", 15.0)
    clock.switch("useful", 19.0)
    return clock


@pytest.mark.parametrize(
    ("slowest_busy_s", "idle", "communication"),
    [(5, 0, 4), (8, 3, 1), (9, 4, 0), (30, 4, 0), (2, 0, 4)],
    ids=["none slower", "slower", "all waiting", "more than all", "this is the slowest"],
)
def test_waiting_is_idle_as_long_as_a_peer_is_busy(slowest_busy_s, idle, communication):
    clock = stepping_clock()
    assert clock.busy_s(19.0) == 5
    clock.commit(19.0, slowest_busy_s=slowest_busy_s)
    expected = {"useful": 5, "idle": idle, "communication": communication, "startup": 10}
    assert nonzero(clock, 19.0) == {kind: seconds for kind, seconds in expected.items() if seconds}


def test_what_is_committed_stays_when_the_next_step_is_lost():
    clock = stepping_clock()
    clock.commit(19.0, slowest_busy_s=6.0)
    assert clock.busy_s(22.0) == 3  # the optimizer's update: it belongs to the next commit
    clock.abandon(22.0)
    assert nonzero(clock, 22.0) == {"useful": 5, "idle": 1, "communication": 3, "startup": 10, "repeated": 3}


def test_lost_step_is_repeated_work_and_waiting_for_the_dead_is_detection():
    clock = stepping_clock()
    clock.switch("communication", 20.0)
    clock.abandon(50.0, since_failure_s=28.0)  # the peer died at 22
    clock.switch("recovery", 50.0)
    assert nonzero(clock, 51.0) == {"startup": 10, "repeated": 5 + 4 + 1 + 2, "detection": 28, "recovery": 1}


def test_detection_is_no_longer_than_the_waiting():
    clock = stepping_clock()
    clock.abandon(19.0, since_failure_s=100.0)
    assert nonzero(clock, 19.0) == {"startup": 10, "repeated": 5, "detection": 4}


def test_reading_data_keeps_others_waiting_too():
    clock = DeviceClock(0.0, kind="data")
    clock.switch("useful", 7.0)
    assert clock.busy_s(10.0) == 10
    clock.commit(10.0, slowest_busy_s=10.0)
    assert nonzero(clock, 10.0) == {"data": 7, "useful": 3}


def test_block_returns_to_what_was_before_even_if_it_raises():
    clock = DeviceClock(0.0, kind="useful")
    times = iter([2.0, 5.0, 6.0, 7.0])
    with clock.of("checkpoint", lambda: next(times)):
        assert clock.kind == "checkpoint"
    with pytest.raises(ZeroDivisionError), clock.of("communication", lambda: next(times)):
        raise ZeroDivisionError
    assert clock.kind == "useful"
    assert nonzero(clock, 10.0) == {"useful": 2 + 1 + 3, "checkpoint": 3, "communication": 1}


def test_clock_does_not_go_back():
    clock = stepping_clock()
    with pytest.raises(GoodputError, match="useful since 19 s can't end before that, at 18 s"):
        clock.switch("idle", 18.0)


def test_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(GoodputError, match="'other' is no kind of time; expected one of useful, idle"):
        DeviceClock(0.0).switch("other", 1.0)


moves = st.tuples(st.integers(0, 20), st.sampled_from([*KINDS, "commit", "abandon"]), st.integers(0, 30))


@given(start=st.integers(-50, 50), steps=st.lists(moves))
def test_kinds_add_up_to_the_time_since_the_start(start, steps):
    clock, at = DeviceClock(float(start)), float(start)
    for length, what, number in steps:
        at += length
        if what == "commit":
            clock.commit(at, slowest_busy_s=float(number))
        elif what == "abandon":
            clock.abandon(at, since_failure_s=float(number))
        else:
            clock.switch(what, at)
        totals = clock.totals(at + 1)
        assert sum(totals.values()) == at + 1 - start
        assert list(totals) == list(KINDS)
        assert min(totals.values()) >= 0
