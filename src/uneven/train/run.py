"""The launcher's side of a training job: start the ranks, hear what they report, go on without those that fail."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

import torch

from uneven.checkpoint.folder import Checkpoint
from uneven.comm import Transport, World
from uneven.elastic.agent import Agent
from uneven.elastic.coordinator import Coordinator
from uneven.elastic.faults import parse_fault
from uneven.elastic.fleet import Fleet
from uneven.elastic.quorum import Quorum, Spent
from uneven.elastic.saving import PartWritten
from uneven.elastic.supervisor import Supervision, Supervisor
from uneven.errors import ConfigError, NonFiniteGradient, RankFailed
from uneven.goodput import Event as JobEvent
from uneven.launch.inline import InlineRank
from uneven.launch.launcher import LaunchSettings
from uneven.launch.rank import Mailbox, Message
from uneven.launch.site import Site
from uneven.modelspec import BytesRead
from uneven.train.accounts import Accounts
from uneven.train.checkpoints import Publisher
from uneven.train.folder import RunFolder
from uneven.train.job import Job
from uneven.train.records import MODEL, STOP, Check, Evaluation, Outcome, Started, StepRecord

REPORTS = (BytesRead, PartWritten, Started, StepRecord, Evaluation, Outcome, Check)
"""What ranks post, besides what every elastic job has."""

Ranks = Supervisor | Agent | InlineRank
Event = Started | StepRecord | Evaluation | Outcome | Check | JobEvent


@final
class TrainingRun:
    """One run of a job in a new folder. Iterating over it trains, and gives what happens as it happens.

    It goes on when devices or hosts fail, but for torchrun's and Slurm's. On several hosts each has one; the first
    writes the folder and hears what happens, the others add their ranks' logs.
    """

    def __init__(
        self, job: Job, folder: Path, *, site: Site | None = None, checkpoint: Checkpoint | None = None
    ) -> None:
        """With `checkpoint`, that of an earlier run in the folder, which is gone on with."""
        self.job = job
        self._checkpoint = checkpoint
        self.folder = folder
        self.site = site or Site()
        self._transport = choose_transport(job, self.site)
        self._ranks: Ranks | None = None
        self._wants_stop = False
        self._accounts: Accounts | None = None
        self._publisher: Publisher | None = None
        self._outcome: Outcome | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether the job outlives its ranks."""
        return not self.site.is_rank

    def request_stop(self) -> None:
        """Let every rank end after its current step, and save. May be called from a signal handler."""
        self._wants_stop = True
        if self._ranks is not None:
            self._ranks.tell(STOP)

    def __iter__(self) -> Iterator[Event]:
        """Train. Raises RankFailed, or NonFiniteGradient once the model has been saved."""
        began = time.perf_counter()
        resumed_at = None if self._checkpoint is None else self._checkpoint.manifest.step
        run = RunFolder(self.job, self.folder, resumed_at=resumed_at)
        with (
            run.open() if self.site.is_first else nullcontext(run),
            self._start(run) as self._ranks,
            self._keep_accounts(self._ranks, run) as self._accounts,
        ):
            if self._wants_stop:
                self._ranks.tell(STOP)
            for message in self._hear(self._ranks):
                if isinstance(message, JobEvent):
                    yield from self._note(message, run)
                elif message.kind == "result" and self._accounts is not None:
                    self._accounts.left(message.device)
                elif message.kind == "post" and self.site.is_first:
                    yield from self._take(message, run, time_s=time.perf_counter() - began)
            if not self.is_elastic:
                # The job ends for all together: till then each hears of what fails elsewhere.
                self.site.peers.exchange("done")
        self._judge()

    def _start(self, run: RunFolder) -> Ranks:
        config = self.job.config
        settings = LaunchSettings(
            self._transport,
            num_threads=config.launch.threads,
            logs=None if self.site.is_rank else self.folder / "logs",
            site=self.site,
        )
        args = (self.job, self.folder, self.is_elastic)
        plan = self.job.plan
        if not self.is_elastic:
            return InlineRank(_train_rank, args, devices=plan.devices, settings=settings)
        if not self.site.is_first:
            return Agent(_train_rank, args, home=plan, settings=settings, reports=REPORTS)
        checkpoint = None if self._checkpoint is None else self._checkpoint.folder
        coordinator = Coordinator(plan, weights=self.job.weights, checkpoint=checkpoint, furthest=run.furthest)
        self._publisher = Publisher(self.job, self.folder, coordinator=coordinator)
        return Supervisor(
            Fleet(_train_rank, args, home=plan, settings=settings, reports=REPORTS),
            coordinator=coordinator,
            supervision=Supervision(config.elastic.hang_s, tuple(map(parse_fault, config.elastic.faults)), self.folder),
        )

    def _keep_accounts(self, ranks: Ranks, run: RunFolder) -> AbstractContextManager[Accounts | None]:
        if not isinstance(ranks, Supervisor):
            return nullcontext()
        return Accounts(self.job, self.folder, ranks=ranks, furthest=run.furthest)

    @property
    def goodput(self) -> float | None:
        """Useful part of the time of all devices so far; None where nobody keeps account."""
        return None if self._accounts is None else self._accounts.goodput

    @property
    def metrics_port(self) -> int | None:
        """Where the metrics are served, if they are."""
        return None if self._accounts is None or self._accounts.exporter is None else self._accounts.exporter.port

    def _hear(self, ranks: Ranks) -> Iterator[Message | JobEvent]:
        if isinstance(ranks, Supervisor):
            return ranks.events()
        if isinstance(ranks, Agent):
            ranks.serve()
            return iter(())
        plan = self.job.plan
        checkpoint = None if self._checkpoint is None else self._checkpoint.folder
        ranks.tell(Quorum(0, plan.devices, plan, checkpoint=checkpoint, plans={0: plan}))
        return ranks.messages()

    def _note(self, event: JobEvent, run: RunFolder) -> Iterator[Event]:
        """What has happened to devices."""
        assert isinstance(self._ranks, Supervisor)
        if self._accounts is not None:
            event = dataclasses.replace(event, time_s=event.time_s + self._accounts.began_s)
            self._accounts.note(event)
        run.tell(event)
        run.show_devices(self._ranks.devices())
        if event.kind in ("recovery", "join") and event.step is not None and event.step < run.last_step:
            run.roll_back(event.step)
        yield event

    def _take(self, message: Message, run: RunFolder, *, time_s: float) -> Iterator[Event]:
        """What a rank reports."""
        report: Any = message.payload
        if isinstance(report, PartWritten):
            yield from self._publish(message.device, report, run=run)
        elif isinstance(report, Spent):
            if self._accounts is not None:
                self._accounts.spent(message.device, report)
        elif isinstance(report, BytesRead):
            run.read(message.device, report)
        elif isinstance(report, StepRecord | Evaluation):
            if not run.log(report):
                return
            if isinstance(report, StepRecord) and self._accounts is not None:
                self._accounts.step(report.step, report.tokens)
            yield report
        elif isinstance(report, Outcome):
            self._outcome = dataclasses.replace(report, num_tokens=run.num_tokens)
            run.conclude(self._outcome, Check(), time_s=time_s)
            yield self._outcome
        elif isinstance(report, Check) and self._outcome is not None:
            run.conclude(self._outcome, report, time_s=time_s)
            yield report
        elif isinstance(report, Started):
            if isinstance(self._ranks, Supervisor):
                run.show_devices(self._ranks.devices())
            yield report

    def _publish(self, device: int, written: PartWritten, *, run: RunFolder) -> Iterator[Event]:
        """A rank has written its part of a checkpoint."""
        assert self._publisher is not None
        assert isinstance(self._ranks, Supervisor)
        text = self._publisher.take(device, written, tokens=run.num_tokens)
        if text:
            event = JobEvent(self._ranks.now_s, "checkpoint", step=written.step, text=text)
            yield from self._note(event, run)

    def _judge(self) -> None:
        """Whether a job whose ranks have all ended has done what it was to do."""
        outcome, limit = self._outcome, self.job.config.train.max_nonfinite
        if outcome is None:
            if self.site.is_first:
                raise RankFailed("all ranks have ended, and none of them has saved the model")
            return
        if outcome.nonfinite_in_row >= limit:
            raise NonFiniteGradient(
                f"stopped after step {outcome.last_step}: gradients were not finite in {outcome.nonfinite_in_row} "
                f"steps in a row (train.max_nonfinite); the model after the last update is in {self.folder / MODEL}; "
                f"a lower train.lr (now {self.job.config.train.lr:g}) is the usual remedy"
            )


def _train_rank(world: World, mailbox: Mailbox, *args: Any) -> None:
    # Here and not at the top: ranks have it loaded, and the launcher, which does not need it, would start them later.
    from uneven.train.program import train_rank

    train_rank(world, mailbox, *args)


def choose_transport(job: Job, site: Site) -> Transport:
    """How ranks communicate, and where their tensors are. Raises ConfigError if this host lacks the GPUs."""
    config = job.config
    backend = config.launch.backend
    if backend == "auto":
        backend = "gloo" if config.device == "cpu" else "nccl"
    if config.device == "cuda":
        found = torch.cuda.device_count()
        needed = site.num_neighbours if site.is_rank else len(site.devices_here(job.plan.devices))
        # Slurm may show to each rank its own GPU only.
        if found == 0 or (backend == "nccl" and found < needed and not (site.is_rank and found == 1)):
            raise ConfigError(
                f"device is 'cuda': found {found} GPUs on this machine, its part of the plan has {needed} devices; "
                f"use device = 'cpu', fewer devices, or launch.backend = 'gloo', with which ranks share GPUs"
            )
    elif backend == "nccl":
        raise ConfigError("launch.backend is 'nccl', which needs device = 'cuda', found 'cpu'; use 'gloo' or 'auto'")
    return Transport(backend, config.device, timeout_s=config.launch.timeout_s)
