"""A job in simulated time, of whole seconds: real clocks and a real ledger, no processes.

Each rank's clock starts at a moment of its own, since processes on several hosts share none.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from uneven.goodput import DeviceClock, Event, Ledger

TOKENS = 1000
"""In every step."""


class SimulatedJob:
    """What a training loop and its launcher do, without the work."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.time = ledger.began_s
        self.clocks: dict[int, DeviceClock] = {}
        self.events: list[Event] = []

    def start(self, *devices: int, boot_s: int = 2, build_s: int = 3) -> None:
        """Processes come up while the others wait, and build the model."""
        for device in devices:
            self.ledger.started(device, self.time)
        self.time += boot_s
        for device in devices:
            self.clocks[device] = DeviceClock(self._of(device))
        self.time += build_s
        self._switch("useful")
        self.report()

    def step(self, busy_s: Sequence[int], *, bytes_s: int = 1) -> None:
        """Each device works, waits for the slowest, then for bytes. It works on after the commit."""
        began = self.time
        for clock, (device, own_s) in zip(self.clocks.values(), self._shares(busy_s), strict=True):
            clock.switch("communication", self._of(device, began + own_s))
        self.time += max(own_s for _, own_s in self._shares(busy_s)) + bytes_s
        slowest = max(clock.busy_s(self._of(device)) for device, clock in self.clocks.items())
        for device, clock in self.clocks.items():
            clock.commit(self._of(device), slowest_busy_s=slowest)
        self._switch("useful")
        self.ledger.count(TOKENS, is_committed=True)
        self.report()

    def fail(self, device: int, *, after_s: int, notice_s: int, recover_s: int = 2, move_s: int = 1) -> None:
        """A device dies in a step, in which the others wait for it from the start."""
        self._switch("communication")
        self.time += after_s
        failed_at = self.time
        self.event("failure", device)
        self.time += notice_s
        del self.clocks[device]
        self.ledger.failed(device, last_alive_at=failed_at, noticed_at=self.time)
        self.ledger.count(TOKENS, is_committed=False)
        for other, clock in self.clocks.items():
            clock.abandon(self._of(other), since_failure_s=notice_s)
        for kind, length_s in (("recovery", recover_s), ("reshard", move_s)):
            self._switch(kind)
            self.time += length_s
        self._switch("useful")
        self.event("recovery", device, detect_s=notice_s, recover_s=recover_s + move_s, bytes_moved=10**6)
        self.report()

    def spend(self, kind: str, length_s: int) -> None:
        """All devices do the same."""
        self._switch(kind)
        self.time += length_s
        self._switch("useful")
        self.report()

    def leave(self, device: int) -> None:
        del self.clocks[device]
        self.ledger.left(device, self.time)
        self.event("drain", device)

    def report(self) -> None:
        for device, clock in self.clocks.items():
            self.ledger.reported(device, clock.totals(self._of(device)), at=self.time)

    def event(self, kind: str, device: int | None = None, **facts: float) -> None:
        self.events.append(Event(self.time, kind, device, **facts))

    def end(self) -> None:
        self.ledger.ended(self.time)
        self.ledger.flush(self.time)

    def _shares(self, busy_s: Sequence[int]) -> list[tuple[int, int]]:
        return [(device, busy_s[index % len(busy_s)]) for index, device in enumerate(self.clocks)]

    def _switch(self, kind: str) -> None:
        for device, clock in self.clocks.items():
            clock.switch(kind, self._of(device))

    def _of(self, device: int, time: float | None = None) -> float:
        """A moment on the device's own clock."""
        return (self.time if time is None else time) + 1000.0 * device


def write_run(folder: Path) -> SimulatedJob:
    """The folder of a job of three devices of which one dies and comes back, an event in each of its moments."""
    folder.mkdir(parents=True, exist_ok=True)
    with Ledger(folder / "goodput.jsonl", num_parameters=10**6) as ledger:
        job = SimulatedJob(ledger)
        job.start(0, 1, 2)
        for _ in range(10):
            job.step([4, 5, 3])
            ledger.flush(job.time)
        job.fail(1, after_s=2, notice_s=4)
        ledger.flush(job.time)
        for _ in range(10):
            job.step([6, 7])
            ledger.flush(job.time)
        job.start(1)
        job.event("join", 1)
        job.spend("checkpoint", 2)
        job.event("checkpoint")
        job.event("a word of its own")
        job.step([4, 5, 3])
        job.end()
    (folder / "events.jsonl").write_text("".join(json.dumps(event.to_json()) + "\n" for event in job.events))
    return job
