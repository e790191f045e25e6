"""Values that cross from host to host, there and back through JSON."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_layout_plan import STRUCTURE
from uneven.checkpoint.manifest import Part, Slice, Stored
from uneven.elastic.difference import Difference
from uneven.elastic.faults import Point, Reached, Stops
from uneven.elastic.quorum import Differs, Over, Quorum, Ready, Settled, Spent, Trouble, Wish
from uneven.elastic.saving import PartWritten
from uneven.elastic.wire import Wire
from uneven.errors import HostLost
from uneven.launch.failure import Failure
from uneven.launch.rank import Beat
from uneven.layout import ParallelPlan
from uneven.modelspec import BytesRead
from uneven.planner import repartition
from uneven.train.records import Check, Evaluation, Outcome, Started, StepRecord
from uneven.train.run import REPORTS

whole = st.integers(0, 2**53)
number = st.floats(allow_nan=False)
text = st.text()
point = st.builds(Point, st.sampled_from(["forward", "commit", "join"]), st.none() | whole)
devices = st.lists(whole).map(tuple)
difference = st.builds(Difference, devices, devices, st.booleans())
stored = st.builds(Stored, st.builds(Slice, text, text, whole, whole), text, whole, text)
part = st.builds(Part, st.just("rank-0.safetensors"), whole, st.lists(stored).map(tuple))
buffer = st.tuples(text, devices)
value = st.one_of(
    st.none() | text,
    st.builds(Stops, st.lists(point).map(tuple)),
    st.builds(Reached, point, whole),
    st.sampled_from([Over(), Ready(), Wish(), Started()]),
    st.builds(Settled, whole, whole, whole, st.booleans(), text),
    st.builds(Differs, whole, whole, st.lists(difference).map(tuple), st.booleans()),
    st.builds(PartWritten, whole, whole, whole, whole, text, st.none() | part, st.lists(buffer).map(tuple), text),
    st.builds(Trouble, whole, text),
    st.builds(Beat, whole, text, st.booleans()),
    st.builds(Failure, number, text),
    st.builds(
        StepRecord, whole, number, number, number, whole, number, st.booleans(), st.none() | st.lists(whole).map(tuple)
    ),
    st.builds(Evaluation, whole, number, number),
    st.builds(Outcome, whole, number, whole, whole, st.booleans(), whole, whole),
    st.builds(Check, st.none() | number, st.none() | text, st.none() | text),
    st.builds(BytesRead, whole, whole),
)

WIRE = Wire(STRUCTURE, reports=REPORTS)


def cross(value: Any) -> Any:
    return WIRE.decode(json.loads(json.dumps(WIRE.encode(value))))


@given(value)
def test_values_arrive_as_they_were(sent: Any) -> None:
    found = cross(sent)
    assert (type(found), found) == (type(sent), sent)
    assert hash(found) == hash(sent)  # no list where a tuple was


def test_losses_that_are_no_numbers_arrive_too() -> None:
    found = cross(StepRecord(1, float("nan"), float("inf"), 0.1, 5, 0.2, True, None))
    assert (repr(found.loss), found.grad_norm) == ("nan", float("inf"))


def test_a_quorum_arrives_with_its_plans_and_without_the_model() -> None:
    home = ParallelPlan.from_shares(STRUCTURE, [[1, 1, 1], [1, 1]])
    plan = repartition(home, home=home, devices=[0, 1, 3, 4])
    for checkpoint in (None, Path("runs/1/checkpoints/step-7")):
        quorum = Quorum(7, (0, 1, 2, 3, 4), plan, True, checkpoint, {5: home, 7: plan})
        assert cross(quorum) == quorum
    assert STRUCTURE.parameters[0].name not in json.dumps(WIRE.encode(quorum))


def test_moments_arrive_as_ages() -> None:
    """Hosts' clocks differ: what is two seconds ago here is so there."""
    name, sent = WIRE.encode(Spent(3, time.monotonic() - 2.0, {"useful": 1.5, "idle": 0.5}))
    assert (name, sent["seconds"]) == ("Spent", {"useful": 1.5, "idle": 0.5})
    assert -2.5 < sent["at_s"] <= -2.0
    assert time.monotonic() - WIRE.decode([name, sent]).at_s == pytest.approx(2.0, abs=0.5)


def test_an_error_of_ours_keeps_its_kind() -> None:
    found = cross(Failure(1.0, "gone", HostLost("gone")))
    assert (found.text, type(found.error)) == ("gone", HostLost)


def test_what_is_not_to_cross_is_refused() -> None:
    with pytest.raises(TypeError, match="a complex can't be sent to another host"):
        WIRE.encode(1j)
    with pytest.raises(KeyError):
        WIRE.decode(["Popen", ["rm"]])
    with pytest.raises(ValueError, match="generation"):
        WIRE.decode(["Trouble", {"text": ""}])
