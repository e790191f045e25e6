"""Ranks that die at every point of a step, a recovery and a return, and a training that does not notice."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests import models, oracle
from tests.faults.test_launcher import has_ended
from tests.ranks.parity import SEED, SMALL_BUCKETS, own_rows
from uneven.comm import Transport, World
from uneven.elastic.compare import Comparison
from uneven.elastic.coordinator import Coordinator
from uneven.elastic.division import Recipe
from uneven.elastic.faults import Fault, Phase, Point
from uneven.elastic.fleet import Fleet
from uneven.elastic.inbox import FOLDER, Request, put
from uneven.elastic.member import Care, Member
from uneven.elastic.ranks import LEFT
from uneven.elastic.supervisor import Supervision, Supervisor
from uneven.goodput import Event
from uneven.launch.launcher import LaunchSettings
from uneven.launch.rank import Mailbox
from uneven.launch.zygote import warm_up
from uneven.layout import Copies, ModelLayout, ParallelPlan
from uneven.modelspec import ModelSpec
from uneven.optim import AdamW
from uneven.parallel import build_model, fill_random
from uneven.reshard import Tiles

TOLERANCE = 1e-10
SETTINGS = LaunchSettings(Transport(timeout_s=60.0), num_threads=1)
STOP = "stop"
WRONG_AFTER = 3
PAUSE_STEPS = 2
MOST_STEPS = 500
CLIP = 0.5
PHASES: tuple[Phase, ...] = (
    *("forward", "backward", "sync", "commit", "apply", "gather"),
    *("recovery", "join", "reshard"),
)

# What ranks run


@dataclass(frozen=True, slots=True)
class Course:
    """A training whose batches are functions of the step, until the test says that it is enough, or `num_steps`.

    Device `wrong` has another bit than the others in a weight after step WRONG_AFTER, and bits are compared.
    """

    shares: tuple[tuple[float, ...], ...] = ((1,),)
    copies: Copies = 2
    num_steps: int | None = None
    wrong: int | None = None
    is_expelling: bool = True

    @property
    def spec(self) -> ModelSpec:
        return models.model_spec("llama", num_hidden_layers=1, vocab_size=101, intermediate_size=160)

    @property
    def plan(self) -> ParallelPlan:
        return ParallelPlan.from_shares(self.spec.structure, self.shares)


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step is committed."""

    step: int


Part = tuple[int, int, int, Any]
"""First and last slice along a dimension, the dimension, the values."""
State = Mapping[str, Mapping[str, tuple[Part, ...]]]
"""By kind, and by parameter."""


@dataclass(frozen=True, slots=True)
class Outcome:
    step: int
    state: State


def as_parts(tiles: Tiles) -> Mapping[str, tuple[Part, ...]]:
    return {
        name: tuple((tile.start, tile.stop, tile.dim, tile.view.numpy().copy()) for tile in found)
        for name, found in tiles.items()
    }


def train(world: World, mailbox: Mailbox, course: Course) -> Outcome:
    """One rank."""
    spec = course.spec

    def fill(model: PreTrainedModel, layout: ModelLayout) -> None:
        fill_random(model, layout, spec=spec, device=world.device, seed=SEED)

    recipe = Recipe(
        build=lambda: build_model(spec, dtype=torch.float64),
        rule=AdamW(betas=(0.9, 0.95), weight_decay=0.1),
        copies=course.copies,
        bucket_bytes=SMALL_BUCKETS,
    )
    care = None if course.wrong is None else Care(Comparison(every=1, is_expelling=course.is_expelling))
    member = Member(recipe, world=world, mailbox=mailbox, start=fill, care=care)
    outcome = None
    is_told = False
    while outcome is None:
        with member.begin() as step:
            is_told = is_told or mailbox.poll() == STOP
            if (member.step and member.last.values[0] > 0) or member.step == course.num_steps:
                outcome = conclude(member)
            else:
                attempt(member, spec, step=step, wants_stop=is_told)
                if (world.device, step) == (course.wrong, WRONG_AFTER):
                    flip_a_bit(member.model.get_parameter("model.norm.weight"))
    return outcome


def flip_a_bit(parameter: torch.Tensor) -> None:
    parameter.detach().view(torch.int64)[5] ^= 1


def attempt(member: Member, spec: ModelSpec, *, step: int, wants_stop: bool) -> None:
    world, pulse = member.world, member.world.pulse
    rows = models.token_batch(spec, 7, seq_len=5, seed=step)
    mine = own_rows(member.plan, rows, device=world.device)
    member.reducer.begin(1)
    loss = oracle.call(member.model, mine, num_tokens=rows[:, 1:].size)
    pulse.reach("backward")
    loss.backward()
    pulse.reach("sync")
    gradients = member.reducer.finish()
    member.commit(gradients, [torch.tensor(float(wants_stop))], lr=1e-3, clip=CLIP)
    if world.device == member.plan.devices[0]:
        member.mailbox.post(Stepped(step))


def conclude(member: Member) -> Outcome:
    """Nobody ends while it may be needed again."""
    member.world.everyone(purpose="commit").all_reduce(torch.zeros(1))
    optimizer = member.division.optimizer
    assert {state.step for state in optimizer.states} <= {member.step}
    kinds = {kind: as_parts(optimizer.tiles(kind)) for kind in optimizer.kinds}
    return Outcome(member.step, {"parameters": as_parts(optimizer.parameters), **kinds})


# What the test does


@dataclass
class Told:
    """What came of a job."""

    outcomes: list[Outcome] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)

    def count(self, kind: str) -> Counter[int | None]:
        return Counter(event.device for event in self.events if event.kind == kind)

    def texts(self, kind: str) -> list[str]:
        return [event.text for event in self.events if event.kind == kind]

    def have_happened(self, faults: Sequence[Fault]) -> bool:
        """Whether all faults have, and the deaths have been seen that they were to cause."""
        deadly = sum(fault.action in ("kill", "hang") for fault in faults)
        return len(self.texts("fault")) == len(faults) and len(self.texts("failure")) == deadly

    def watch(self, job: Supervisor) -> None:
        """Remember the processes that there are."""
        for pid in job.fleet.pids.values():
            if pid not in self.pids:
                self.pids[pid] = os.pidfd_open(pid)


@contextmanager
def supervised(course: Course, supervision: Supervision) -> Iterator[tuple[Supervisor, Told]]:
    """A job of which no process is left after the block."""
    warm_up("transformers.models.llama.modeling_llama", "uneven.elastic.member", __name__)
    told = Told()
    coordinator = Coordinator(course.plan)
    fleet = Fleet(train, (course,), home=course.plan, settings=SETTINGS)
    job = Supervisor(fleet, coordinator=coordinator, supervision=supervision)
    with job:
        told.watch(job)
        yield job, told
    for pid, pidfd in told.pids.items():
        assert has_ended(pidfd, within_s=5.0), f"process {pid} is left"
        os.close(pidfd)


def run(course: Course, faults: Sequence[Fault] = (), *, hang_s: float | None = None) -> Told:
    """Train; who has died or left returns two steps later. Ends when all faults have happened and all are back."""
    with TemporaryDirectory() as folder:
        (Path(folder) / FOLDER).mkdir()
        supervision = Supervision(hang_s, tuple(faults), Path(folder))
        with supervised(course, supervision) as (job, told):
            _follow(job, told, course, supervision=supervision)
    assert told.texts("missed") == []
    assert told.texts("refused") == []
    return told


def _follow(job: Supervisor, told: Told, course: Course, *, supervision: Supervision) -> None:
    returns: dict[int, int] = {}
    is_told = course.num_steps is not None
    for found in job.events():
        if isinstance(found, Event):
            told.events.append(found)
            told.watch(job)
            if found.kind == "failure":
                returns[found.device] = PAUSE_STEPS
        elif isinstance(found.payload, Outcome):
            told.outcomes.append(found.payload)
        elif found.payload == LEFT:
            returns[found.device] = PAUSE_STEPS
        elif isinstance(found.payload, Stepped) and not is_told:
            assert found.payload.step < MOST_STEPS, f"no more than {told.texts('fault')} happened"
            returns = {device: left - 1 for device, left in returns.items()}
            for device in [device for device, left in returns.items() if left <= 0]:
                put(supervision.folder, Request("join", device))
                del returns[device]
            if not returns and told.have_happened(supervision.faults) and is_whole(job):
                is_told = True
                job.tell(STOP)


def is_whole(job: Supervisor) -> bool:
    """Whether all devices take part, and are to."""
    coordinator = job.coordinator
    return (
        not coordinator.leaving
        and coordinator.is_settled
        and set(coordinator.quorum.plan.devices) == set(coordinator.home.devices)
    )


def assemble(outcomes: Sequence[Outcome], spec: ModelSpec) -> dict[tuple[str, str], torch.Tensor]:
    """The undivided tensors; whoever holds an element has the same."""
    found = {}
    for kind in outcomes[0].state:
        for each in spec.structure.parameters:
            whole = torch.full(each.shape, torch.nan, dtype=torch.float64)
            for outcome in outcomes:
                for start, stop, dim, values in outcome.state[kind].get(each.name, ()):
                    place = whole.narrow(dim, start, stop - start)
                    given = torch.from_numpy(values)
                    assert bool((place.isnan() | (place == given)).all()), (kind, each.name)
                    place.copy_(given)
            found[kind, each.name] = whole
    return found


@cache
def undisturbed(num_steps: int) -> dict[tuple[str, str], torch.Tensor]:
    course = Course(num_steps=num_steps)
    return assemble(run(course).outcomes, course.spec)


def assert_undisturbed(told: Told, course: Course) -> None:
    if course.num_steps is None:
        assert len(told.outcomes) == len(course.plan.devices)
    (step,) = {outcome.step for outcome in told.outcomes}
    needed, found = undisturbed(step), assemble(told.outcomes, course.spec)
    assert needed.keys() == found.keys()
    errors = {key: oracle.relative_error(found[key], needed[key]) for key in needed}
    assert not {key: error for key, error in errors.items() if not error <= TOLERANCE}


def chain(device: int, phases: Sequence[Phase] = PHASES) -> list[Fault]:
    """Kill a device at whichever of these points it comes to first, and each process of it that takes its place."""
    return [Fault("kill", device, Point(phase)) for phase in phases]


def assert_happened(told: Told, faults: Sequence[Fault]) -> None:
    assert Counter(told.texts("fault")) == Counter(map(str, faults))
    assert told.count("failure") == Counter(fault.device for fault in faults)
    assert told.texts("retry") == []
    assert told.texts("hang") == []


FOUR_AND_THREE = ((1.0,) * 4, (1.0,) * 3)
THREE_PAIRS = ((1.0,) * 2,) * 3


@pytest.mark.parametrize(("device", "phases"), [(0, PHASES), (5, ("backward", "apply", "gather", "reshard"))])
def test_a_death_at_any_point_changes_nothing(device: int, phases: Sequence[Phase]) -> None:
    course = Course(FOUR_AND_THREE)
    faults = chain(device, phases)
    told = run(course, faults)
    assert_happened(told, faults)
    assert told.texts("recovery") == [""] * len(faults)  # nothing was lost
    assert_undisturbed(told, course)


def test_a_death_during_a_recovery_changes_nothing() -> None:
    course = Course(FOUR_AND_THREE)
    points: list[tuple[int, Point]] = [
        (1, Point("forward", 3)),
        (2, Point("recovery", 3)),
        (6, Point("commit", 7)),
        (5, Point("reshard", 7)),
    ]
    faults = [Fault("kill", device, point) for device, point in points]
    told = run(course, faults)
    assert_happened(told, faults)
    assert told.texts("recovery") == [""] * 4  # the other replica had it all
    assert_undisturbed(told, course)


def test_a_job_begins_anew_where_every_copy_is_gone() -> None:
    course = Course(((1.0,) * 2, (1.0,)))
    faults = [Fault("kill", 0, Point("backward", 4)), Fault("kill", 2, Point("reshard", 4))]
    told = run(course, faults)
    assert_happened(told, faults)
    recoveries = [event for event in told.events if event.kind == "recovery"]
    assert [(event.device, event.step) for event in recoveries] == [(0, 0), (2, 0)]
    assert {event.text for event in recoveries} == {"model.embed_tokens.weight, elements (0, 51), is lost"}
    assert_undisturbed(told, course)


@pytest.mark.parametrize("copies", [1, 2])
def test_deaths_where_others_keep_the_state_change_nothing(copies: Copies) -> None:
    course = Course(THREE_PAIRS, copies=copies)
    faults = chain(0, ("commit", "apply", "gather", "reshard") if copies == 2 else ("gather",))
    told = run(course, faults)
    assert_happened(told, faults)
    assert [bool(text) for text in told.texts("recovery")] == [copies == 1] * len(faults)
    assert_undisturbed(told, course)


def test_pairs_of_deaths_in_one_step_change_nothing() -> None:
    course = Course(THREE_PAIRS)
    phases: tuple[Phase, ...] = ("forward", "gather", "reshard")
    faults = [*chain(0, phases), *chain(3, phases)]
    told = run(course, faults)
    assert_happened(told, faults)
    assert_undisturbed(told, course)


def test_a_rank_that_hangs_is_ended() -> None:
    course = Course(((1.0,) * 2, (1.0,)))
    faults = [Fault("hang", 0, Point("commit", 3))]
    told = run(course, faults, hang_s=1.0)
    assert told.texts("fault") == ["hang:device=0,step=3,phase=commit"]
    assert told.texts("hang") == ["no progress for 1.0 s: ended"]
    (failure,) = [event for event in told.events if event.kind == "failure"]
    assert (failure.device, failure.text) == (0, "the process ended by signal SIGKILL without a traceback")
    assert 1.0 < failure.detect_s < 5.0
    assert_undisturbed(told, course)


def test_a_device_that_is_drained_leaves_and_may_return() -> None:
    course = Course(((1.0,) * 2, (1.0,)))
    told = run(course, [Fault("drain", device, Point("forward", 3)) for device in (0, 2)])
    assert told.texts("fault") == ["drain:device=0,step=3", "drain:device=2,step=3"]
    assert told.count("drain") == Counter([0, 2])
    assert told.count("join") == Counter([0, 2])
    assert told.count("failure") == Counter()
    assert_undisturbed(told, course)


@pytest.mark.parametrize("phase", ["commit", "gather"])
def test_a_death_in_the_last_step_changes_nothing(phase: Phase) -> None:
    course = Course(THREE_PAIRS, num_steps=4)
    faults = [Fault("kill", 0, Point(phase, 4))]
    told = run(course, faults)
    assert_happened(told, faults)
    assert len(told.outcomes) == 5
    assert {outcome.step for outcome in told.outcomes} == {4}
    assert_undisturbed(told, course)


def test_a_device_with_another_bit_is_named_and_expelled() -> None:
    told = run(Course(((1.0,) * 2, (1.0,)), num_steps=8, wrong=1))
    assert [(event.device, event.step) for event in told.events if event.kind == "corruption"] == [(1, WRONG_AFTER)]
    assert told.count("failure") == told.count("recovery") == Counter([1])
    assert [outcome.step for outcome in told.outcomes] == [8, 8]


def test_a_device_with_another_bit_is_only_named_where_it_may_stay() -> None:
    """Once after each step, though all members say so."""
    told = run(Course(((1.0,) * 2, (1.0,)), num_steps=8, wrong=1, is_expelling=False))
    assert told.count("corruption") == Counter({1: 8 - WRONG_AFTER})
    assert told.count("failure") == Counter()
    assert [outcome.step for outcome in told.outcomes] == [8, 8, 8]
