"""Who hangs, on a simulated clock."""

import pytest

from uneven.elastic.watch import BUSY_S, LEAST_S, STEPS_PER_LIMIT, Watch


def watch(*devices: int, limit_s: float | None = 1.0, has_spoken: bool = True) -> Watch:
    """A watch on devices that were started, and perhaps heard of, at 0."""
    found = Watch(limit_s)
    for device in devices:
        found.start(device, 0.0)
        if has_spoken:
            found.hear(device, 0.0, num_beats=0)
    return found


def test_silence_is_a_hang_whatever_the_rank_does() -> None:
    for waiting, is_stepping in (("", True), ("", False), ("commit", True), ("commit", False)):
        found = watch(0, 1)
        for tenth in range(1, 20):
            now = tenth / 10
            found.hear(0, now, num_beats=tenth, waiting=waiting)
            found.hear(1, min(now, 0.5), num_beats=min(tenth, 5), waiting=waiting)
            assert found.hung(now, is_stepping=is_stepping) == ([1] if now > 1.5 else [])


def test_standstill_is_a_hang_of_one_that_waits_for_nobody_within_steps() -> None:
    found = watch(0, 1)
    for tenth in range(1, 20):
        now = tenth / 10
        found.hear(0, now, num_beats=0)
        found.hear(1, now, num_beats=0, waiting="commit")
        assert found.hung(now, is_stepping=True) == ([0] if now > 1.0 else [])
        assert found.hung(now, is_stepping=False) == []
    found.hear(0, BUSY_S + 0.1, num_beats=0)
    found.hear(1, BUSY_S + 0.1, num_beats=0, waiting="commit")
    assert found.hung(BUSY_S + 0.1, is_stepping=False) == [0]


def test_what_a_rank_says_shows_that_it_gets_on() -> None:
    found = watch(0)
    for tenth in range(1, 30):
        found.hear(0, tenth / 10, num_beats=0)
        if tenth % 9 == 0:
            found.hear(0, tenth / 10)
        assert found.hung(tenth / 10, is_stepping=True) == []
    assert found.last_alive_s(0) == 2.7


def test_a_process_that_has_not_spoken_is_given_time_to_start() -> None:
    found = watch(0, has_spoken=False)
    assert found.hung(BUSY_S, is_stepping=True) == [0]  # no sign of life and no progress, within steps
    assert found.hung(BUSY_S, is_stepping=False) == []
    assert found.hung(BUSY_S + 0.1, is_stepping=False) == [0]


def test_who_has_ended_or_was_never_started_is_not_heard() -> None:
    found = watch(0)
    found.end(0)
    found.end(0)
    found.hear(0, 1.0, num_beats=1)
    found.hear(7, 1.0, num_beats=1)
    assert found.hung(1e6, is_stepping=True) == []
    assert not found.is_stalled(1e6)
    found.start(0, 1e6)
    assert found.hung(1e6, is_stepping=True) == []


def test_all_wait_for_each_other() -> None:
    found = watch(0, 1)
    for now in (0.5, 1.0, 1.5):
        found.hear(0, now, num_beats=1, waiting="grads")
        found.hear(1, now, num_beats=2, waiting="commit")
        assert not found.is_stalled(now)
    for now in (1.4, 1.6):
        assert found.is_stalled(now) == (now > 1.5)
    found.hear(1, 1.6, num_beats=2)
    assert not found.is_stalled(1.7)  # one waits for nobody
    found.hear(1, 1.7, num_beats=3, waiting="commit")
    assert not found.is_stalled(1.8)  # one has got on


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.01, LEAST_S), (0.25, LEAST_S), (1.0, 20.0), (30.0, 600.0)])
def test_the_limit_follows_the_time_of_steps(step_s: float, limit_s: float) -> None:
    found = Watch()
    assert found.limit_s == 4 * LEAST_S
    for seconds in (step_s, step_s, 1000 * step_s):
        found.step(seconds)
    assert found.limit_s == limit_s == max(LEAST_S, STEPS_PER_LIMIT * step_s)
    for _ in range(50):
        found.step(2.0)
    assert found.limit_s == STEPS_PER_LIMIT * 2.0  # of the last fifty
    given = Watch(0.5)
    given.step(step_s)
    assert given.limit_s == 0.5
