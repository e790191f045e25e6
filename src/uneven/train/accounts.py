"""How a run's devices spend their time: the ledger of its folder, kept by what the launcher hears."""

from pathlib import Path
from types import TracebackType
from typing import Self, final

from uneven.elastic.quorum import Spent
from uneven.elastic.supervisor import Supervisor
from uneven.goodput import Event, Ledger, Report
from uneven.goodput.book import FILE
from uneven.train.exporter import Exporter
from uneven.train.job import Job

FLUSH_S = 5.0
"""How often the file, and what is shown, is brought up to date."""


@final
class Accounts:
    """The ledger of an elastic job, its report, and the metrics' server if the job is to have one."""

    def __init__(self, job: Job, folder: Path, *, ranks: Supervisor) -> None:
        self._ledger = Ledger(folder / FILE, num_parameters=job.plan.structure.num_parameters)
        self._ranks = ranks
        self._events: list[Event] = []
        self._flushed_s = 0.0
        self._num_lost = 0
        self._furthest = 0
        self._told_s: dict[int, float] = {}
        self._goodput = 0.0
        port = job.config.log.metrics_port
        self.exporter = None if port is None else Exporter(port)
        for device in job.plan.devices:
            self._ledger.started(device, self.now_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ledger.ended(self.now_s)
        self._ledger.flush(self.now_s)
        self._ledger.close()
        if self.exporter is not None:
            self.exporter.close()

    @property
    def now_s(self) -> float:
        """Seconds of the job, those of earlier launchers included."""
        return self._ledger.began_s + self._ranks.now_s

    def spent(self, device: int, spent: Spent) -> None:
        """A device has told of its time; when it did counts, and not when it was heard."""
        self._told_s[device] = self._ledger.began_s + self._ranks.since_start(spent.at_s)
        self._ledger.reported(device, spent.seconds, at=self._told_s[device])
        if self.now_s - self._flushed_s > FLUSH_S:
            self.flush()

    def step(self, step: int, tokens: int) -> None:
        """A step was committed; what was lost in attempts at it, or is done again, was computed in vain."""
        lost, self._num_lost = self._ranks.num_lost_attempts - self._num_lost, self._ranks.num_lost_attempts
        self._ledger.count(lost * tokens, is_committed=False)
        self._ledger.count(tokens, is_committed=step > self._furthest)
        self._furthest = max(step, self._furthest)

    def note(self, event: Event) -> None:
        """Something has happened to a device."""
        self._events.append(event)
        if event.device is None:
            return
        if event.kind == "start":
            self._ledger.started(event.device, event.time_s)
        elif event.kind == "failure":
            alive_s = event.time_s - (event.detect_s or 0.0)
            self._ledger.failed(event.device, last_alive_at=alive_s, noticed_at=event.time_s)
        if event.kind in ("failure", "recovery", "join", "drain"):
            self.flush()

    def left(self, device: int) -> None:
        """A device's program has returned."""
        self._ledger.left(device, self._told_s.get(device, self.now_s))

    @property
    def goodput(self) -> float:
        """That of the allocated devices at the last flush."""
        return self._goodput

    @property
    def report(self) -> Report:
        return Report.of(self._ledger.book(self.now_s), self._events)

    def flush(self) -> None:
        """Write and show what is known."""
        self._flushed_s = self.now_s
        self._ledger.flush(self._flushed_s)
        report = self.report
        self._goodput = report.goodput_allocated
        if self.exporter is not None:
            self.exporter.show(report)
