"""A launcher's loop over an elastic job: hear the ranks, end those that hang, tell the others who goes on."""

import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from uneven.elastic.coordinator import Coordinator
from uneven.elastic.faults import Fault, Reached, Stops
from uneven.elastic.fleet import Fleet, Loss
from uneven.elastic.inbox import Request, take
from uneven.elastic.quorum import Differs, Over, Quorum, Ready, Settled, Spent, Trouble, Wish
from uneven.elastic.ranks import LEFT
from uneven.elastic.watch import Watch
from uneven.errors import RankFailed
from uneven.goodput import Event
from uneven.launch.rank import Beat, Message

TICK_S = 0.1
"""How often to look at the clock while nothing is heard."""
GRACE_S = 2.0
"""After a rank could not finish an operation, how long to wait for the death that explains it."""
RETRIES = 3
"""How often in a row a generation may fail without a death or a step in between."""


@dataclass(slots=True)
class _Recovery:
    """A quorum on its way: why it came to be, and since when."""

    kind: str
    devices: tuple[int, ...]
    since_s: float
    detect_s: float | None = None
    bytes_moved: int = 0
    is_redone: bool = False
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Supervision:
    """How a job is looked after: after how many seconds a rank hangs (None: by the time of steps), what is to fail on
    purpose, and the run's folder from which requests are taken, if any."""

    hang_s: float | None = None
    faults: tuple[Fault, ...] = ()
    folder: Path | None = None


@final
class Supervisor:
    """Runs the ranks of the coordinator's plan, and goes on when devices or hosts fail.

    As a context it ends all processes on leaving. Their program makes a `Member`; who raises ends the job. Every host
    but the first has an `Agent` instead.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        coordinator: Coordinator,
        supervision: Supervision | None = None,
    ) -> None:
        self.fleet = fleet
        self.coordinator = coordinator
        supervision = supervision or Supervision()
        self.watch = Watch(supervision.hang_s)
        self._faults = list(supervision.faults)
        self._folder = supervision.folder
        self._began_s = time.monotonic()
        self._ended_s: dict[int, float] = {}
        self._trouble: tuple[float, Trouble] | None = None
        self._num_retries = 0
        self._done: set[int] = set()
        self._lost: set[int] = set()
        self._recovery: _Recovery | None = None
        self._step = 0
        self._stepped_s = 0.0
        self._compared = 0
        self._is_stopping = False
        self._commands: deque[Any] = deque()
        self.num_lost_attempts = 0

    def __enter__(self) -> Self:
        self.fleet.__enter__()
        quorum = self.coordinator.start()
        for device in self.coordinator.home.devices:
            self._greet(device)
        self._tell(quorum)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.fleet.__exit__(kind, error, tb)

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return self.since_start(time.monotonic())

    def since_start(self, monotonic_s: float) -> float:
        """The same for another moment of this host's monotonic clock."""
        return monotonic_s - self._began_s

    def tell(self, command: Any) -> None:
        """Send a command to all ranks, soon: this may be called from a signal handler, in the midst of another.

        After it nobody leaves on notice any more: all are about to end.
        """
        self._is_stopping = True
        self._commands.append(command)

    def devices(self) -> list[dict[str, Any]]:
        """Who is there, as `devices.json` has it: every device of the job but those that have left as asked."""
        coordinator, running, pids = self.coordinator, self.fleet.running, self.fleet.pids
        found = []
        for device in coordinator.home.devices:
            is_member = device in coordinator.quorum.plan.devices
            state = "failed" if device not in running else "healthy" if is_member else "joining"
            if device in coordinator.leaving:
                state = "draining"
            if device not in running and device not in self._lost:
                continue
            found.append(
                {
                    "id": device,
                    "replica": coordinator.home.replica_of(device),
                    "pid": pids.get(device),
                    "host": self.fleet.host_name(device),
                    "state": state,
                }
            )
        return found

    def events(self) -> Iterator[Message | Event]:
        """What ranks post and return, and what happens to them, until all have ended.

        Raises what a rank raised, and QuorumLost if no device is left.
        """
        while self.fleet.running:
            messages = self.fleet.poll(TICK_S)
            heard_s = self.now_s
            for message in messages:
                yield from self._take(message)
            yield from self._look()
            # Whoever takes the events may be slow, and signs of life lie unread meanwhile.
            self.watch.forgive(self.now_s - heard_s)
        for fault in self._faults:
            yield self._event("missed", fault.device, text=f"{fault}: did not happen")

    # What ranks say

    def _take(self, message: Message) -> Iterator[Message | Event]:
        device, payload = message.device, message.payload
        if isinstance(payload, Beat):
            self.watch.hear(device, self.now_s, beat=payload)
            return
        self.watch.hear(device, self.now_s)
        if message.kind == "error":
            raise self.fleet.fail({device: payload})
        if message.kind == "end":
            yield from self._bury([device], payload.text.partition(";")[0])
        elif message.kind == "result":
            self.watch.end(device)
            if payload != LEFT:
                # Those who still wait for a quorum wait in vain.
                self._done.add(device)
                self.fleet.tell(Over())
            elif not self._done and (quorum := self.coordinator.leave(device)) is not None:
                self._tell(quorum)
            yield message
        elif isinstance(payload, Settled):
            yield from self._settle(device, payload)
        elif isinstance(payload, Reached):
            yield from self._strike(device, payload)
        elif isinstance(payload, Ready):
            self.coordinator.admit(device)
        elif isinstance(payload, Trouble):
            self._trouble = self._trouble or (self.now_s, payload)
        elif isinstance(payload, Differs):
            yield from self._expel(payload)
        elif isinstance(payload, Wish):
            if not self._is_stopping:
                yield from self._grant(Request("drain", device))
        else:
            yield message
            if isinstance(payload, Spent):
                self.watch.work(device)
                yield from self._commit(payload.step, payload.at_s)

    def _commit(self, step: int, at_s: float) -> Iterator[Event]:
        """A step is done; faults that come between steps happen now."""
        if step <= self._step:
            return
        self._step, self._num_retries = step, 0
        if self._stepped_s:
            self.watch.step(at_s - self._stepped_s)
        self._stepped_s = at_s
        for fault in [f for f in self._faults if f.action in ("drain", "return") and (f.point.step or 0) <= step + 1]:
            self._faults.remove(fault)
            yield self._event("fault", fault.device, text=str(fault))
            yield from self._grant(Request("drain" if fault.action == "drain" else "join", fault.device))

    def _grant(self, request: Request) -> Iterator[Event]:
        """Do what is asked for, or say why not."""
        device, is_running = request.device, request.device in self.fleet.running
        if device not in self.coordinator.home.devices:
            yield self._event("refused", device, text=f"{request.action}: the job has no such device")
        elif request.action == "join":
            if is_running:
                yield self._event("refused", device, text="join: it is there")
            elif not self.fleet.is_reachable(device):
                yield self._event("refused", device, text="join: its host is not there")
            else:
                yield from self._restart(device)
        elif not is_running or device not in self.coordinator.quorum.members:
            yield self._event("refused", device, text="drain: it takes no part")
        elif not self.coordinator.drain(device):
            yield self._event("refused", device, text="drain: no device would be left")

    def _restart(self, device: int) -> Iterator[Event]:
        """Start the process of a device; it joins at a step boundary once it is ready."""
        self._done.discard(device)
        self._lost.discard(device)
        self.fleet.start(device)
        self._greet(device)
        yield self._event("start", device)

    def _bury(self, devices: Sequence[int], why: str) -> Iterator[Event]:
        """These are dead, all at once."""
        now, detect_s = self.now_s, 0.0
        for device in devices:
            self.watch.end(device)
            self._lost.add(device)
            detect_s = now - self._ended_s.pop(device, now)
            yield self._event("failure", device, detect_s=detect_s, text=why)
        if self._done:
            self.fleet.tell(Over())
            return
        quorum = self.coordinator.lose(devices)
        if quorum is not None:
            before = self._recovery
            lost = (*(before.devices if before and before.kind == "recovery" else ()), *devices)
            self._recovery = _Recovery("recovery", lost, now, detect_s)
            self._tell(quorum)

    def _lose(self, loss: Loss) -> Iterator[Event]:
        """A host is lost, with all of its devices."""
        yield self._event("host", None, text=f"{loss.host} is lost with devices {list(loss.devices)}: {loss.why}")
        for device in loss.devices:
            self._ended_s.setdefault(device, self.now_s - loss.silent_s)
        yield from self._bury(loss.devices, loss.why)

    def _settle(self, device: int, settled: Settled) -> Iterator[Event]:
        recovery = self._recovery
        if recovery is not None and settled.generation == self.coordinator.quorum.generation:
            recovery.bytes_moved += settled.moved_bytes
            recovery.reasons += [settled.reason] if settled.reason else []
            recovery.is_redone |= settled.is_redone
        self._trouble = None
        if self.coordinator.settle(device, generation=settled.generation) and recovery is not None:
            self._recovery = None
            self.num_lost_attempts += recovery.is_redone
            for each in recovery.devices:
                yield Event(
                    time_s=self.now_s,
                    kind=recovery.kind,
                    device=each,
                    step=settled.step,
                    detect_s=recovery.detect_s,
                    recover_s=self.now_s - recovery.since_s,
                    bytes_moved=recovery.bytes_moved,
                    text=recovery.reasons[0] if recovery.reasons else "",
                )

    def _strike(self, device: int, reached: Reached) -> Iterator[Event]:
        """What was to happen to a rank that has stopped for it."""
        for fault in self._faults:
            if fault.device == device and fault.point == reached.point:
                self._faults.remove(fault)
                self._ended_s[device] = self.now_s
                self.fleet.kill(device, signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
                yield self._event("fault", device, text=str(fault))
                return

    def _expel(self, differs: Differs) -> Iterator[Event]:
        """All members say the same; the first one is heard."""
        if differs.generation != self.coordinator.quorum.generation or differs.step <= self._compared:
            return
        self._compared = differs.step
        devices = {device for each in differs.differences if each.is_certain for device in each.devices}
        for each in differs.differences:
            others = f"those of {list(each.members)} are not alike, and no majority says whose are right"
            text = "not the bits of the others" if each.is_certain else others
            for device in each.devices if each.is_certain else ():
                yield self._event("corruption", device, text=text)
            if not each.is_certain:
                yield self._event("corruption", None, text=text)
        for device in sorted(devices) if differs.is_expelling else ():
            self._ended_s[device] = self.now_s
            self.fleet.kill(device)

    # What the clock says

    def _look(self) -> Iterator[Event]:
        for loss in self.fleet.lost(self.watch.limit_s):
            yield from self._lose(loss)
        now = self.now_s
        hung = self.watch.hung(now)
        for device in (device for device in hung if not self.fleet.is_quiet(device)):
            self._ended_s.setdefault(device, self.watch.last_alive_s(device))
            self.watch.end(device)
            self.fleet.kill(device)
            yield self._event("hang", device, text=f"no progress for {self.watch.limit_s:.1f} s: ended")
        # Who waits for one that has just been ended, or whose host is silent, is about to hear of it.
        is_clear = not self._ended_s and not any(map(self.fleet.is_quiet, self.fleet.running))
        if is_clear and self.watch.is_stalled(now):
            yield from self._retry(f"all ranks have waited for each other for {self.watch.limit_s:.1f} s")
        elif self._trouble is not None and now - self._trouble[0] > GRACE_S:
            trouble = self._trouble[1]
            if trouble.generation == self.coordinator.quorum.generation:
                yield from self._retry(trouble.text)
            self._trouble = None
        for command in self.fleet.asked():
            self.tell(command)
        while self._commands:
            self.fleet.tell(self._commands.popleft())
        if not self._done:
            for request in () if self._folder is None else take(self._folder):
                yield from self._grant(request)
            change = self.coordinator.change()
            if change is not None:
                self._announce_change(change)

    def _announce_change(self, quorum: Quorum) -> None:
        before = set(quorum.plans[quorum.generation - 1].devices)
        after = set(quorum.plan.devices)
        kind = "join" if after - before else "drain"
        devices = tuple(sorted(after - before)) if kind == "join" else tuple(sorted(before - after))
        self._recovery = _Recovery(kind, devices, self.now_s)
        self._tell(quorum)

    def _retry(self, why: str) -> Iterator[Event]:
        self._num_retries += 1
        if self._num_retries > RETRIES:
            raise RankFailed(f"gave up after {RETRIES} new starts of the same devices: {why}")
        for device in self.fleet.running:
            self.watch.start(device, self.now_s)
        self._tell(self.coordinator.retry())
        yield self._event("retry", None, text=why)

    # What ranks are told

    def _greet(self, device: int) -> None:
        self.watch.start(device, self.now_s)
        points = tuple(f.point for f in self._faults if f.device == device and f.action in ("kill", "hang"))
        self.fleet.tell(Stops(points), devices=[device])

    def _tell(self, quorum: Quorum) -> None:
        self.watch.renew(quorum.members, self.now_s)
        self.fleet.tell(quorum, devices=quorum.members)

    def _event(self, kind: str, device: int | None, *, detect_s: float | None = None, text: str = "") -> Event:
        return Event(time_s=self.now_s, kind=kind, device=device, step=self._step, detect_s=detect_s, text=text)
