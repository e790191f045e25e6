"""Who hangs, on a simulated clock."""

import pytest

from uneven.elastic.watch import BUSY_S, LEAST_S, STEPS_PER_LIMIT, Watch
from uneven.launch.rank import Beat


def watch(*devices: int, limit_s: float | None = 1.0, has_spoken: bool = True, has_worked: bool = True) -> Watch:
    """A watch on devices that were started at 0, and perhaps heard of, and have done a step."""
    found = Watch(limit_s)
    for device in devices:
        found.start(device, 0.0)
        if has_spoken:
            found.hear(device, 0.0, beat=beat(0))
        if has_worked:
            found.work(device)
    return found


def beat(num_beats: int, waiting: str = "", *, is_busy: bool = False) -> Beat:
    return Beat(num_beats, waiting, is_busy)


@pytest.mark.parametrize("waiting", ["", "commit"])
@pytest.mark.parametrize("is_busy", [True, False])
def test_silence_is_a_hang_whatever_the_rank_does(waiting: str, is_busy: bool) -> None:
    found = watch(0, 1)
    for tenth in range(1, 20):
        now = tenth / 10
        found.hear(0, now, beat=beat(tenth, waiting, is_busy=is_busy))
        found.hear(1, min(now, 0.5), beat=beat(min(tenth, 5), waiting, is_busy=is_busy))
        assert found.hung(now) == ([1] if now > 1.5 else [])


def test_standstill_is_a_hang_of_one_that_waits_for_nobody() -> None:
    found = watch(0, 1, 2)
    for tenth in range(1, 20):
        now = tenth / 10
        found.hear(0, now, beat=beat(0))
        found.hear(1, now, beat=beat(0, "commit"))
        found.hear(2, now, beat=beat(0, is_busy=True))
        assert found.hung(now) == ([0] if now > 1.0 else [])
    for device, each in enumerate((beat(0), beat(0, "commit"), beat(0, is_busy=True))):
        found.hear(device, BUSY_S + 0.1, beat=each)
    assert found.hung(BUSY_S + 0.1) == [0, 2]


def test_a_first_step_may_take_longer() -> None:
    found = watch(0, has_worked=False)
    for now in range(1, 9):
        found.hear(0, float(now), beat=beat(0))
        assert found.hung(float(now)) == ([0] if now > LEAST_S else [])
    found.hear(0, 9.0)
    found.work(0)
    found.hear(0, 10.1, beat=beat(0))
    assert found.hung(10.1) == [0]
    found.work(7)  # has ended meanwhile


def test_what_a_rank_says_shows_that_it_gets_on() -> None:
    found = watch(0)
    for tenth in range(1, 30):
        found.hear(0, tenth / 10, beat=beat(0))
        if tenth % 9 == 0:
            found.hear(0, tenth / 10)
        assert found.hung(tenth / 10) == []
    assert found.last_alive_s(0) == 2.7


def test_while_nobody_listens_nobody_is_silent() -> None:
    found = watch(0, 1)
    found.hear(0, 0.5, beat=beat(1, "commit"))
    found.forgive(30.0)
    assert found.hung(31.0) == []
    assert found.hung(31.4) == [1]
    assert found.hung(31.6) == [0, 1]


def test_a_process_that_has_not_spoken_is_given_time_to_start() -> None:
    found = watch(0, has_spoken=False, has_worked=False)
    assert found.hung(BUSY_S) == []
    assert found.hung(BUSY_S + 0.1) == [0]


def test_who_has_ended_or_was_never_started_is_not_heard() -> None:
    found = watch(0)
    found.end(0)
    found.end(0)
    found.hear(0, 1.0, beat=beat(1))
    found.hear(7, 1.0, beat=beat(1))
    assert found.hung(1e6) == []
    assert not found.is_stalled(1e6)
    found.start(0, 1e6)
    assert found.hung(1e6) == []


def test_all_wait_for_each_other() -> None:
    found = watch(0, 1)
    for now in (0.5, 1.0, 1.5):
        found.hear(0, now, beat=beat(1, "grads"))
        found.hear(1, now, beat=beat(2, "commit"))
        assert not found.is_stalled(now)
    for now in (1.4, 1.6):
        assert found.is_stalled(now) == (now > 1.5)
    found.hear(1, 1.6, beat=beat(2))
    assert not found.is_stalled(1.7)  # one waits for nobody
    found.hear(1, 1.7, beat=beat(3, "commit"))
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
