"""Histories of a job's membership: deaths, joins, drains and retries, with members that settle in any order."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.unit.test_layout_plan import STRUCTURE
from uneven.elastic.coordinator import Coordinator
from uneven.elastic.quorum import Quorum
from uneven.errors import QuorumLost
from uneven.layout import ParallelPlan

NUM_HISTORIES = 1000
HOMES = ([[1, 1, 1], [1, 1]], [[1, 1]], [[2, 1], [1], [1, 1]])
NEVER = -1


@dataclass
class Process:
    """A device's process, as far as the coordinator's answers depend on it."""

    adopted: int = NEVER
    prepared: int = NEVER
    settled: int = NEVER


@dataclass
class History:
    """A job with simulated members, to whom anything may happen at any time."""

    coordinator: Coordinator
    draw: random.Random
    processes: dict[int, Process] = field(default_factory=dict)
    quorums: list[Quorum] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)

    @property
    def quorum(self) -> Quorum:
        return self.quorums[-1]

    def start(self) -> None:
        self.processes = {device: Process() for device in self.coordinator.home.devices}
        self.take(self.coordinator.start())
        for device in self.processes:
            self.coordinator.admit(device)

    def take(self, quorum: Quorum | None) -> None:
        """Check a new quorum."""
        if quorum is None:
            return
        assert quorum is self.coordinator.quorum
        assert quorum.generation == len(self.quorums)
        self.quorums.append(quorum)
        plan = quorum.plan
        assert set(plan.devices) <= set(quorum.members) <= set(self.processes)
        assert quorum.members == tuple(sorted(quorum.members))
        # Who is to leave is out, unless there is nobody else.
        assert set(plan.devices) - self.asked in (set(), set(plan.devices))
        assert quorum.plans[quorum.generation] == plan
        for device in quorum.members:
            adopted = self.processes[device].adopted
            assert adopted == NEVER or quorum.plans[adopted] == self.quorums[adopted].plan
        newest = max(self.processes[device].adopted for device in quorum.members)
        for device in quorum.members:
            process = self.processes[device]
            assert newest in (process.adopted, process.prepared) or process.adopted == NEVER
        for replica in plan.replicas:
            for module, partition in replica.layout.partitions.items():
                assert len(partition.owners) == STRUCTURE.axes[module].num_units
                assert set(partition.owners) <= set(replica.layout.devices)

    # What may happen

    def kill(self) -> None:
        victims = self.draw.sample(sorted(self.processes), self.draw.choice([1, 1, 1, min(2, len(self.processes))]))
        for device in victims:
            del self.processes[device]
        self.waiting -= set(victims)
        self.asked -= set(victims)
        is_needed = bool(set(victims) & set(self.coordinator.quorum.plan.devices))
        quorum = self.coordinator.lose(victims)
        assert quorum is not None or not is_needed
        assert quorum is None or not quorum.is_planned
        self.take(quorum)

    def give_back(self) -> None:
        """Start the process of a device that has none; once it is ready it waits."""
        absent = sorted(set(self.coordinator.home.devices) - set(self.processes))
        if absent:
            device = self.draw.choice(absent)
            self.processes[device] = Process()
            self.waiting.add(device)
            self.coordinator.admit(device)

    def drain(self) -> None:
        candidates = sorted(set(self.quorum.plan.devices) - self.asked)
        if len(candidates) > 1:
            device = self.draw.choice(candidates)
            self.coordinator.drain(device)
            self.asked.add(device)
            assert device in self.coordinator.leaving

    def retry(self) -> None:
        before = self.quorum
        # Once all others have settled they need nothing more of one that is about to leave.
        needed = before.plan.devices if self.coordinator.is_settled else before.members
        quorum = self.coordinator.retry()
        assert set(quorum.members) == set(needed) & set(self.processes) - self.waiting
        self.take(quorum)

    def change(self) -> None:
        is_settled, before = self.coordinator.is_settled, set(self.quorum.plan.devices)
        needed = before - self.asked | self.waiting or before
        quorum = self.coordinator.change()
        assert (quorum is not None) == (is_settled and needed != before)
        if quorum is not None:
            assert quorum.is_planned
            assert set(quorum.plan.devices) == needed
            assert set(quorum.members) == before | self.waiting
            self.waiting = set()
            self.take(quorum)

    def prepare(self) -> None:
        """All members of the newest quorum come to its barrier, if they have not."""
        generation = self.quorum.generation
        if any(generation in (process.adopted, process.prepared) for process in self.processes.values()):
            return
        assert set(self.quorum.members) <= set(self.processes)
        members = [self.processes[device] for device in self.quorum.members]
        newest = max(member.adopted for member in members)
        for member in members:
            if member.prepared == newest:
                member.adopted = newest
            member.prepared = generation

    def pass_barrier(self) -> None:
        """One of those who have prepared a generation learns that all have; its word comes later, or never."""
        ready = [device for device, process in self.processes.items() if process.prepared != NEVER]
        if ready:
            process = self.processes[self.draw.choice(ready)]
            process.adopted, process.prepared = process.prepared, NEVER

    def settle(self) -> None:
        """The word of one that has adopted a generation, perhaps an old one, arrives; one that is to leave leaves."""
        entered = [device for device, process in self.processes.items() if process.adopted > process.settled]
        if not entered:
            return
        device = self.draw.choice(sorted(entered))
        process = self.processes[device]
        process.settled = process.adopted
        if device in self.quorums[process.adopted].plan.devices:
            self.coordinator.settle(device, generation=process.adopted)
        else:
            del self.processes[device]
            self.asked.discard(device)
            self.take(self.coordinator.leave(device))

    def finish(self) -> None:
        """Nothing more happens: all settle, and the job is as it should be."""
        for _ in range(4):
            self.prepare()
            while any(p.prepared != NEVER for p in self.processes.values()):
                self.pass_barrier()
            while any(p.adopted > p.settled for p in self.processes.values()):
                self.settle()
            self.change()
        assert self.coordinator.is_settled
        assert self.asked in (set(), set(self.processes))
        assert not self.waiting
        assert set(self.quorum.plan.devices) == set(self.processes)
        assert self.coordinator.leaving == self.asked


EVENTS: tuple[tuple[Callable[[History], None], int], ...] = (
    (History.kill, 1),
    (History.give_back, 3),
    (History.drain, 1),
    (History.retry, 1),
    (History.change, 4),
    (History.prepare, 5),
    (History.pass_barrier, 12),
    (History.settle, 14),
)


def live(seed: int) -> History | None:
    """A random history of up to 120 events; None if it ended with the job."""
    draw = random.Random(seed)
    history = History(Coordinator(ParallelPlan.from_shares(STRUCTURE, draw.choice(HOMES))), draw)
    history.start()
    events = [event for event, _ in EVENTS]
    for _ in range(draw.randint(5, 120)):
        try:
            draw.choices(events, [weight for _, weight in EVENTS])[0](history)
        except QuorumLost:
            assert not set(history.processes) - history.asked - history.waiting
            return None
    history.finish()
    return history


def test_any_history_ends_with_those_who_live() -> None:
    histories = [live(seed) for seed in range(NUM_HISTORIES)]
    num_ended = histories.count(None)
    assert NUM_HISTORIES / 20 < num_ended < NUM_HISTORIES / 2
    most = max(len(history.quorums) for history in histories if history is not None)
    assert most > 12
    generations = [quorum for history in histories if history is not None for quorum in history.quorums]
    assert sum(quorum.is_planned for quorum in generations) > NUM_HISTORIES / 2


# One by one


def job(*shares: list[float]) -> Coordinator:
    coordinator = Coordinator(ParallelPlan.from_shares(STRUCTURE, shares))
    coordinator.start()
    return coordinator


def settle(coordinator: Coordinator) -> None:
    """All devices of the newest plan enter it; the last one is told apart."""
    *others, last = coordinator.quorum.plan.devices
    generation = coordinator.quorum.generation
    assert not any(coordinator.settle(device, generation=generation) for device in others)
    assert coordinator.settle(last, generation=generation)
    assert not coordinator.settle(last, generation=generation)


def test_a_job_without_devices_is_lost() -> None:
    coordinator = job([1, 1], [1])
    assert coordinator.lose([1, 2]) is not None
    with pytest.raises(QuorumLost, match=r"^no device is left of \[0, 1, 2\]$"):
        coordinator.lose([0])


def test_who_was_to_leave_stays_until_somebody_else_is_there() -> None:
    coordinator = job([1, 1], [1])
    settle(coordinator)
    assert coordinator.drain(2)
    assert coordinator.drain(1)
    assert not coordinator.drain(0)
    assert coordinator.lose([0]).plan.devices == (1, 2)
    settle(coordinator)
    assert coordinator.leaving == {1, 2}
    assert coordinator.change() is None
    coordinator.admit(0)
    assert coordinator.change().plan.devices == (0,)
    settle(coordinator)
    assert coordinator.leaving == frozenset()


def test_words_of_another_generation_settle_nothing() -> None:
    coordinator = job([1, 1])
    coordinator.retry()
    assert not coordinator.settle(0, generation=0)
    assert not coordinator.settle(1, generation=0)
    assert not coordinator.is_settled
    settle(coordinator)
    assert coordinator.is_settled


def test_who_dies_before_it_has_joined_changes_nothing() -> None:
    coordinator = job([1, 1], [1])
    coordinator.lose([2])
    settle(coordinator)
    coordinator.admit(2)
    assert coordinator.lose([2]) is None
    assert coordinator.change() is None


def test_a_device_that_was_drained_may_return() -> None:
    coordinator = job([1, 1], [1])
    settle(coordinator)
    coordinator.drain(1)
    assert coordinator.change().members == (0, 1, 2)
    settle(coordinator)
    assert coordinator.leave(1) is None
    coordinator.admit(1)
    returned = coordinator.change()
    assert (returned.members, returned.plan.devices) == ((0, 1, 2), (0, 1, 2))
    settle(coordinator)


def test_nobody_waits_for_one_that_has_left() -> None:
    coordinator = job([1, 1], [1, 1])
    settle(coordinator)
    coordinator.drain(1)
    coordinator.change()
    assert coordinator.leave(1) is None  # after the barrier, though no other has said that it has passed it
    assert coordinator.lose([3]).members == (0, 2)
    coordinator = job([1, 1], [1, 1])
    settle(coordinator)
    coordinator.drain(1)
    coordinator.change()
    assert coordinator.lose([3]).members == (0, 1, 2)
    assert coordinator.leave(1).members == (0, 2)
