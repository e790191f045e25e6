"""What members conclude from each other's statuses, for every way in which a recovery finds them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import lone_world
from uneven.elastic.status import NEVER, NUM_VALUES, Status, Verdict, exchange

VALUES = (4.0, *[0.0] * (NUM_VALUES - 1))
"""Of a commit whose gradient norm is 2."""
NUMBERS = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, -0.0]))


def bits(values: tuple[float, ...]) -> list[int]:
    """Equal for numbers that are, not-a-numbers among them."""
    return torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()


# Rows


@given(
    numbers=st.tuples(*[st.integers(-1, 2**53)] * 5),
    is_gathered=st.booleans(),
    values=st.tuples(*[NUMBERS] * NUM_VALUES),
)
def test_a_status_survives_its_row(numbers, is_gathered, values) -> None:
    status = Status(*numbers, is_gathered=is_gathered, values=values)
    row = torch.tensor(status.to_row(), dtype=torch.float64).tolist()
    back = Status.from_row(row)
    assert back.to_row()[:6] == status.to_row()[:6]
    assert (type(back.step), type(back.is_gathered)) == (int, bool)
    assert [math.isnan(x) for x in back.values] == [math.isnan(x) for x in values]
    assert bits(tuple(x for x in back.values if x == x)) == bits(tuple(x for x in values if x == x))


def test_one_alone_hears_itself() -> None:
    status = Status(3, 4, 17, 15, 2, False, (math.inf, math.nan, *[1.5] * (NUM_VALUES - 2)))
    (found,) = exchange(status, group=lone_world().everyone(purpose="test")).values()
    assert repr(found) == repr(status)


# Verdicts


def at(step: int, *, adopted: int = 0, prepared: int = NEVER, is_gathered: bool = True, values=VALUES) -> Status:
    return Status(adopted, prepared, step, step, 0, is_gathered, values)


def test_nobody_has_a_state() -> None:
    assert Verdict.of({0: Status(), 1: Status()}) == Verdict(NEVER, Status(), {})
    # Prepared, but the barrier that makes it a state has been passed by nobody.
    assert Verdict.of({0: Status(prepared=0), 1: Status()}) == Verdict(NEVER, Status(), {})


def test_all_stand_at_the_same_step() -> None:
    verdict = Verdict.of({0: at(5), 1: at(5), 2: at(5)})
    assert verdict == Verdict(0, at(5), {0: True, 1: True, 2: True})


def test_who_joins_holds_nothing() -> None:
    verdict = Verdict.of({0: at(5), 1: Status(), 2: Status(prepared=1)})
    assert verdict == Verdict(0, at(5), {0: True})


@pytest.mark.parametrize("late", [{1}, {0, 1}, {2}])
def test_a_step_that_one_has_committed_is_committed(late: set[int]) -> None:
    done = at(6, is_gathered=False)
    statuses = {device: at(5) if device in late else done for device in range(3)}
    assert Verdict.of(statuses) == Verdict(0, done, dict.fromkeys(range(3), False))


def test_parameters_are_those_that_were_gathered() -> None:
    verdict = Verdict.of({0: at(6), 1: at(6, is_gathered=False), 2: at(5)})
    assert verdict.holders == {0: True, 1: False, 2: False}
    assert verdict.latest.step == 6
    assert verdict.latest.values == VALUES


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_skipped_step_needs_no_gather(norm: float) -> None:
    skipped = at(6, values=(norm, *VALUES[1:]))
    verdict = Verdict.of({0: skipped, 1: at(5), 2: at(5)})
    assert verdict.holders == dict.fromkeys(range(3), True)
    assert verdict.latest is skipped


def test_a_plan_that_one_has_adopted_is_adopted() -> None:
    statuses = {0: at(5, adopted=2), 1: at(5, prepared=2), 2: at(5, adopted=NEVER, prepared=2), 3: Status()}
    verdict = Verdict.of(statuses)
    assert (verdict.adopted, verdict.holders) == (2, {0: True, 1: True, 2: True})


def test_a_plan_that_all_have_prepared_and_none_has_adopted_is_not() -> None:
    statuses = {0: at(5, prepared=2), 1: at(5, prepared=2), 2: at(5, adopted=NEVER, prepared=2)}
    verdict = Verdict.of(statuses)
    assert (verdict.adopted, verdict.holders) == (0, {0: True, 1: True})


def test_what_was_prepared_is_whole_and_what_it_was_made_from_is_not() -> None:
    prepared = at(6, prepared=2, is_gathered=False)
    assert Verdict.of({0: prepared, 1: at(6, adopted=2)}).holders == {0: True, 1: True}
    assert Verdict.of({0: prepared, 1: prepared}).holders == {0: False, 1: False}


def test_those_who_have_prepared_stand_at_the_step_of_those_who_have_adopted() -> None:
    # After the barrier one has gone on and committed; the others hold its gradients only if they have adopted too.
    statuses = {0: at(6, adopted=2, is_gathered=False), 1: at(5, adopted=2), 2: at(6, adopted=2)}
    verdict = Verdict.of(statuses)
    assert (verdict.latest.step, verdict.holders) == (6, {0: False, 1: False, 2: True})


def test_a_job_that_has_begun_anew_forgets_the_old_state() -> None:
    statuses = {0: at(0, adopted=3), 1: at(9, adopted=1, prepared=NEVER), 2: at(0, adopted=NEVER, prepared=3)}
    verdict = Verdict.of(statuses)
    assert (verdict.adopted, verdict.latest.step, verdict.holders) == (3, 0, {0: True, 2: True})
