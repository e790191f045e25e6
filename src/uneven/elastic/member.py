"""A rank's side of an elastic job: steps as transactions, and the way from one quorum to the next.

A step is begin, forward and backward with sync, commit, apply. The commit is one sum over all ranks, so whoever has
its result knows that every rank holds the reduced gradients; then nothing can undo the step. Where a device is lost,
the members tell each other how far they have come, finish a step that anyone has committed, or else forget it, move
what is needed to where the new plan wants it, and go on.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from transformers import PreTrainedModel

from uneven.checkpoint.folder import open_checkpoint
from uneven.comm import Group, World
from uneven.elastic.compare import Comparison, compare
from uneven.elastic.division import PURPOSE, Division, Inventory, Recipe, move, share_buffers
from uneven.elastic.line import Line
from uneven.elastic.quorum import Differs, Quorum, Settled, Spent, Trouble
from uneven.elastic.saving import Saver, restore
from uneven.elastic.status import NEVER, NUM_VALUES, Status, Verdict, exchange
from uneven.errors import InputError, Left, PeerLost
from uneven.goodput import DeviceClock
from uneven.launch.rank import Mailbox
from uneven.layout import ModelLayout, ParallelPlan
from uneven.sync import Gradients, GradReducer


@dataclass(frozen=True, slots=True)
class Committed:
    """A step that nothing will undo: its gradient norm, and the sums of the values that were given to `commit`."""

    step: int
    norm: float
    values: tuple[float, ...]

    @property
    def is_skipped(self) -> bool:
        """Whether the gradients were not finite, and changed nothing."""
        return not math.isfinite(self.norm)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What this rank has brought to a commit."""

    gradients: Gradients
    lr: float
    clip: float


@dataclass(frozen=True, slots=True)
class Care:
    """What a member does besides steps: compare, and save checkpoints in the folder of a run, where there is one."""

    comparison: Comparison | None = None
    run: Path | None = None


@final
class Member:
    """A rank of an elastic job. `start` fills a divided model with the weights that the job begins with, if it has not.

    A loop is `while member.step < n: with member.begin() as step: ...; member.commit(...)`. A block that a lost device
    has interrupted is left, and the next `begin` gives the same step again, under a new plan.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        world: World,
        mailbox: Mailbox,
        start: Callable[[PreTrainedModel, ModelLayout], None] = lambda *_: None,
        is_elastic: bool = True,
        care: Care | None = None,
    ) -> None:
        self.world = world
        self.mailbox = mailbox
        self._recipe = recipe
        self._start = start
        self._is_elastic = is_elastic
        care = care or Care()
        self._comparison = care.comparison
        self._saver = None if care.run is None else Saver(care.run, device=world.device, mailbox=mailbox)
        self._status = Status()
        self._division: Division | None = None
        self._prepared: Division | None = None
        self._offer: _Offer | None = None
        self._must_settle = True
        self._is_trying, self._attempted = False, 1
        world.pulse.is_busy = True  # until the first quorum is entered
        self._replayed_to = 0
        self._waiting_since = time.monotonic()
        self.clock = DeviceClock(time.monotonic())
        world.pulse.on_wait = self._on_wait
        self._line = Line(world, mailbox, attempt=lambda: self._attempted)

    # What a loop sees

    @property
    def generation(self) -> int:
        """The generation whose plan is in force; whoever remembers what others may not know forgets it with this."""
        return self._status.adopted

    @property
    def step(self) -> int:
        """How many steps have been committed."""
        return self._status.step

    @property
    def num_updates(self) -> int:
        """How many of them have changed the weights."""
        return self._status.num_updates

    @property
    def skipped_in_row(self) -> int:
        """How many steps up to the last one had gradients that were not finite."""
        return self._status.skipped_in_row

    @property
    def last(self) -> Committed:
        """The last step that was committed."""
        squared_norm, _, *values = self._status.values
        return Committed(self.step, squared_norm**0.5, tuple(values))

    @property
    def division(self) -> Division:
        """Model and optimizer under the current plan."""
        assert self._division is not None, "only within begin()"
        return self._division

    @property
    def plan(self) -> ParallelPlan:
        return self.division.plan

    @property
    def model(self) -> PreTrainedModel:
        return self.division.model

    @property
    def reducer(self) -> GradReducer:
        reducer = self.division.reducer
        assert reducer is not None, "only within begin()"
        return reducer

    def save(self) -> None:
        """Save this rank's part of a checkpoint of the steps so far, in the background; called by all ranks."""
        if self._saver is not None:
            with self.clock.of("checkpoint", time.monotonic):
                self._saver.save(
                    self.division, step=self.step, num_updates=self.num_updates, generation=self.generation
                )
            self.world.pulse.reach("checkpoint")

    def finish_saving(self, timeout_s: float) -> None:
        """Wait for what is being written."""
        if self._saver is not None:
            with self.clock.of("checkpoint", time.monotonic):
                self._saver.poll(timeout_s)

    def account(self) -> None:
        """Tell the launcher how this rank has spent its time so far."""
        now = time.monotonic()
        self.mailbox.post(Spent(self.step, now, self.clock.totals(now)))

    @property
    def replica(self) -> int:
        """The index of this rank's replica in the plan."""
        return self.division.replica

    @property
    def is_leader(self) -> bool:
        """Whether this is the device of its replica that counts what all of them have alike."""
        return self.world.device == self.division.layout.devices[0]

    @contextmanager
    def begin(self) -> Iterator[int]:
        """Enter the newest quorum if need be; the block is one attempt at the step whose number this gives.

        Raises Left, on a device that was to leave, once the others have what they need of it.
        """
        try:
            if self._must_settle or self.world.pulse.is_interrupted:
                self._settle()
            self._line.pass_notice_on()
            if self._saver is not None:
                self._saver.poll()
            self.clock.switch("useful", time.monotonic())
            self._is_trying, self._attempted = True, self.step + 1
            self.world.pulse.is_busy = False
            self.world.pulse.reach("forward")
            yield self.step + 1
            self._is_trying = False
        except PeerLost as error:
            if not self._is_elastic:
                raise
            self._complain(error)

    def commit(
        self, gradients: Gradients, values: Sequence[torch.Tensor] = (), *, lr: float, clip: float = math.inf
    ) -> Committed:
        """Commit and apply a step; called by all ranks, with reduced gradients. `values` are summed over the ranks.

        Steps whose gradient norm is not finite are committed, and change nothing. InputError for too many values.
        """
        if len(values) > NUM_VALUES - 2:
            raise InputError(f"commit sums at most {NUM_VALUES - 2} values, found {len(values)}; stack them before")
        self.world.pulse.reach("commit")
        group = self.world.group(self.plan.devices, purpose="commit")
        mine = torch.zeros(NUM_VALUES + group.size, dtype=torch.float64, device=self.world.torch_device)
        mine[0] = gradients.squared_norm()
        mine[1] = float(self._line.is_change_announced)
        for index, value in enumerate(values, start=2):
            mine[index] = value
        mine[NUM_VALUES + group.rank] = self.clock.busy_s(time.monotonic())
        self._offer = _Offer(gradients, lr, clip)
        *sums, slowest_busy_s = _sums(group.all_reduce(mine))
        self.world.pulse.reach("apply")
        self._apply(sums)
        if self.step > self._replayed_to:
            self.clock.commit(time.monotonic(), slowest_busy_s=slowest_busy_s)
        else:
            self.clock.abandon(time.monotonic())
        if not self._status.is_gathered:
            self.world.pulse.reach("gather")
            self.division.optimizer.gather()
            self._status = replace(self._status, is_gathered=True)
        self._must_settle = sums[1] > 0
        self._compare(group)
        self.account()
        return self.last

    def _compare(self, group: Group) -> None:
        """Every so many steps, see whether all have the same bits; who has not may be expelled before the next step."""
        comparison = self._comparison
        if comparison is None or self.step % comparison.every:
            return
        differences = compare(self.division.optimizer.parameters, self.plan, norm=self.last.norm, group=group)
        if differences:
            is_expelling = comparison.is_expelling and any(each.is_certain for each in differences)
            self._must_settle = self._must_settle or is_expelling
            self.mailbox.post(Differs(self.generation, self.step, differences, is_expelling))

    def _apply(self, sums: Sequence[float]) -> None:
        """Everything of a committed step that takes no communication, so that nothing interrupts it."""
        offer, status = self._offer, self._status
        assert offer is not None
        self._offer = None
        norm = sums[0] ** 0.5
        is_skipped = not math.isfinite(norm)
        if not is_skipped:
            offer.gradients.clip(offer.clip, norm=norm)
            self.division.optimizer.update(offer.gradients.tiles, lr=offer.lr)
        self._status = replace(
            status,
            step=status.step + 1,
            num_updates=status.num_updates + (not is_skipped),
            skipped_in_row=status.skipped_in_row + 1 if is_skipped else 0,
            is_gathered=is_skipped,
            values=tuple(sums),
        )

    def _on_wait(self, begins: bool) -> None:
        """Waiting inside of a step is no work; elsewhere it is a part of what is waited for."""
        now = time.monotonic()
        if begins:
            self._waiting_since = now
            if self.clock.kind == "useful":
                self.clock.switch("communication", now)
        elif self.clock.kind == "communication":
            self.clock.switch("useful", now)

    # Quorums

    def _settle(self) -> None:
        """Enter the newest quorum, and the next if that one loses a member meanwhile."""
        while True:
            quorum = self._line.await_quorum()
            try:
                with self.world.pulse.busy():
                    self._enter(quorum)
            except PeerLost as error:
                if not self._is_elastic:
                    raise
                self._complain(error)
            else:
                self._must_settle = False
                return

    def _complain(self, error: PeerLost) -> None:
        self._must_settle = True
        now = time.monotonic()
        # It waited for who is lost: the wait that was given up was a part of noticing.
        self.clock.abandon(now, since_failure_s=now - self._waiting_since)
        if not self.world.pulse.is_interrupted:
            self.mailbox.post(Trouble(self._line.entered, str(error)))

    def _enter(self, quorum: Quorum) -> None:
        is_redone, attempted = self._is_trying, self.step
        self._is_trying = False
        if self.generation != NEVER:
            self.clock.switch("reshard" if quorum.is_planned else "recovery", time.monotonic())
        self.world.enter(quorum.generation, quorum.members)
        group = self.world.group(quorum.members, purpose=PURPOSE)
        self.world.pulse.reach("recovery" if quorum.generation else "start-up")
        verdict = Verdict.of(exchange(self._status, group=group))
        if verdict.holders and self.world.device not in verdict.holders:
            self.world.pulse.reach("join")
        self._catch_up(verdict)
        moved, reason = self._prepare(quorum, verdict, group=group)
        group.all_reduce(torch.zeros(1, device=self.world.torch_device))
        self._adopt(quorum.generation)
        if self._division is None:
            raise Left(f"device {self.world.device} has left the job after step {self.step}")
        self.world.narrow(quorum.plan.devices)
        self._division.connect(self.world)
        is_redone = is_redone and self.step == attempted
        self.mailbox.post(Settled(quorum.generation, self.step, moved, is_redone, reason))
        self.account()

    def _catch_up(self, verdict: Verdict) -> None:
        """Adopt the plan that others have adopted, and apply the step that others have committed."""
        if verdict.adopted != NEVER and self._status.adopted != verdict.adopted == self._status.prepared:
            self._adopt(verdict.adopted)
        self._prepared = None
        self._status = replace(self._status, prepared=NEVER)
        if self._division is not None:
            if self._status.step < verdict.latest.step:
                self._apply(verdict.latest.values)
            self._division.disconnect()
        self._offer = None

    def _prepare(self, quorum: Quorum, verdict: Verdict, *, group: Group) -> tuple[int, str]:
        """Make this rank's part under the quorum's plan; bytes received, and why the state is another one, if it is."""
        plan, is_staying = quorum.plan, self.world.device in quorum.plan.devices
        have, reason = Inventory({}, {}), ""
        want = Inventory.wanted(plan, self._recipe.copies)
        if verdict.holders:
            have = Inventory.of(quorum.plans[verdict.adopted], self._recipe.copies, gathered=verdict.holders)
            missing = have.lacks(want, plan)
            reason = f"{missing[0][0].name}, elements {missing[0][1][0]}, is lost" if missing else ""
        is_fresh = bool(reason) or not verdict.holders
        if is_fresh:
            self._replayed_to = max(self._replayed_to, verdict.latest.step, quorum.furthest)
            # Everyone starts again: what is left of the state is of no use, and its memory is.
            self._division, self._status = None, Status()
        old = self._division
        new = None
        if is_staying:
            is_kept = old is not None and old.layout == plan.layout_of(self.world.device)
            new = Division(self._recipe, plan, world=self.world, model=old.model if old and is_kept else None)
        moved = 0
        if is_fresh:
            self._begin_anew(new, quorum)
        else:
            self.world.pulse.reach("reshard")
            if self.generation != NEVER:
                self.clock.switch("reshard", time.monotonic())
            moved = move(old, new, have=have, want=want, group=group)
            share_buffers(old, new, holders=verdict.holders, want=want, group=group)
            # Of the old part, which is still the one that counts, parameters may be missing.
            own = self._status
            self._status = replace(verdict.latest, adopted=own.adopted, is_gathered=own.is_gathered)
        if new is not None:
            for state in new.optimizer.states:
                state.step = self._status.num_updates
        self._prepared = new
        self._status = replace(self._status, prepared=quorum.generation)
        return moved, reason

    def _begin_anew(self, new: Division | None, quorum: Quorum) -> None:
        """Fill with the newest checkpoint, or else with the weights that the job begins with."""
        if quorum.checkpoint is not None:
            checkpoint = open_checkpoint(quorum.checkpoint)
            if new is not None:
                restore(new, checkpoint)
            manifest = checkpoint.manifest
            self._status = Status(step=manifest.step, num_updates=manifest.num_updates)
        elif new is not None:
            self._start(new.model, new.layout)
            new.optimizer.set_masters()

    def _adopt(self, generation: int) -> None:
        self._division, self._prepared = self._prepared, None
        self._status = replace(self._status, adopted=generation, prepared=NEVER, is_gathered=True)


def _sums(reduced: torch.Tensor) -> list[float]:
    """What a commit has summed, and the largest of what each rank has put in a place of its own."""
    numbers = reduced.tolist()
    return [*numbers[:NUM_VALUES], max(numbers[NUM_VALUES:])]
