"""The side of an elastic job that decides who takes part: a launcher's, since any rank may die.

Told what has happened, it answers with quorums; it starts, ends and asks nobody. So every history can be tested
without a process.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import final

from uneven.elastic.quorum import Quorum
from uneven.errors import QuorumLost
from uneven.layout import ParallelPlan
from uneven.planner import repartition


@final
class Coordinator:
    """Membership of a job whose plan at the start is `home`; `weights` are the speeds of its devices.

    `checkpoint` is the newest there is; steps up to `furthest` were committed by an earlier launcher.
    """

    def __init__(
        self,
        home: ParallelPlan,
        *,
        weights: Mapping[int, float] | None = None,
        checkpoint: Path | None = None,
        furthest: int = 0,
    ) -> None:
        self.home = home
        self.checkpoint = checkpoint
        self._weights = weights
        self._furthest = furthest
        self._present: set[int] = set()
        self._leaving: set[int] = set()
        self._waiting: set[int] = set()
        self._quorum: Quorum | None = None
        self._missing: set[int] = set()
        self._plans: dict[int, ParallelPlan] = {}

    @property
    def quorum(self) -> Quorum:
        """The newest one."""
        assert self._quorum is not None, "start comes first"
        return self._quorum

    @property
    def is_settled(self) -> bool:
        """Whether all devices of the newest quorum's plan have entered it."""
        return not self._missing

    @property
    def leaving(self) -> frozenset[int]:
        return frozenset(self._leaving)

    def start(self) -> Quorum:
        """The first quorum: all devices."""
        self._present = set(self.home.devices)
        return self._announce(self.home, is_planned=False)

    def lose(self, devices: Collection[int]) -> Quorum | None:
        """These are dead. None if the quorum does not need them. Raises QuorumLost if nobody is left."""
        self._waiting -= set(devices)
        dead = self._present & set(devices)
        if not dead:
            return None
        self._present -= dead
        self._leaving -= dead
        return self._announce(self._next_plan(), is_planned=False)

    def retry(self) -> Quorum:
        """The same members once more, on new connections: an operation failed though all of them live."""
        return self._announce(self._next_plan(), is_planned=False)

    def admit(self, device: int) -> None:
        """A process of this device is ready; `change` takes it in, unless it takes part already."""
        if device not in self._present:
            self._waiting.add(device)

    def drain(self, device: int) -> bool:
        """This device is to leave; `change` lets it. False if no other would be left."""
        if not self._present - self._leaving - {device}:
            return False
        self._leaving |= self._present & {device}
        return True

    def leave(self, device: int) -> Quorum | None:
        """The process of a device that was to leave has left. A quorum if the newest may count on it in vain."""
        if device not in self._present:
            return None
        self._present.discard(device)
        self._leaving.discard(device)
        # It has passed the barrier of a planned quorum; where another came after that, it may be of the one before.
        return None if self.quorum.is_planned else self._announce(self._next_plan(), is_planned=False)

    def change(self) -> Quorum | None:
        """A planned quorum with those who wait, and without those who are to leave; None if all is as it should be.

        Only of a settled job, so that one change follows another.
        """
        if not self.is_settled or self._staying(self._waiting) == set(self.quorum.plan.devices):
            return None
        self._present |= self._waiting
        self._waiting = set()
        return self._announce(self._next_plan(), is_planned=True)

    def settle(self, device: int, *, generation: int) -> bool:
        """This device has entered a generation; whether it was the last one that the newest quorum waited for."""
        if generation != self.quorum.generation or device not in self._missing:
            return False
        self._missing.discard(device)
        if self._missing:
            return False
        # Who was to leave has left: the barrier that all have passed was theirs too.
        self._present = set(self.quorum.plan.devices)
        self._leaving &= self._present
        self._plans = {generation: self.quorum.plan}
        return True

    def _staying(self, joining: Collection[int] = ()) -> set[int]:
        """Who is to go on. Those that are to leave wait with it while nobody else is there."""
        return (self._present - self._leaving).union(joining) or self._present

    def _next_plan(self) -> ParallelPlan:
        staying = self._staying()
        if not staying:
            raise QuorumLost(f"no device is left of {list(self.home.devices)}")
        return repartition(self.quorum.plan, home=self.home, devices=staying, weights=self._weights)

    def _announce(self, plan: ParallelPlan, *, is_planned: bool) -> Quorum:
        generation = 0 if self._quorum is None else self._quorum.generation + 1
        self._plans[generation] = plan
        self._missing = set(plan.devices)
        self._quorum = Quorum(
            generation,
            tuple(sorted(self._present)),
            plan,
            is_planned,
            self.checkpoint,
            dict(self._plans),
            self._furthest,
        )
        return self._quorum
