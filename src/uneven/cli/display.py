"""What `uneven train` shows: the job, its progress, and how it ended."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from uneven.goodput import Event as JobEvent
from uneven.train.job import Job
from uneven.train.records import Check, Evaluation, Outcome, Started, StepRecord, find_traces

LINE_EVERY_S = 10.0
"""How often a console that is no terminal gets a line."""


def describe_job(job: Job, console: Console) -> None:
    """Model, data and division, in a line each, and one more for conversations."""
    structure, stream = job.plan.structure, job.dataset.train.stream
    degrees = " + ".join(str(len(replica.layout.devices)) for replica in job.plan.replicas)
    samples = " + ".join(map(str, job.plan.samples(job.config.train.global_batch)))
    weights = (
        f"weights of {escape(str(job.config.model))}, learning rate {job.config.train.lr:g}"
        if job.design.weights
        else f"random weights, seed {job.config.seed}"
    )
    console.print(
        f"[bold]model[/]    {structure.family}, {structure.num_parameters:,} parameters, {job.config.train.precision}, "
        f"{weights}"
    )
    console.print(
        f"[bold]data[/]     {escape(job.corpus.description)}, {job.corpus.num_bytes / 1e6:.1f} MB, "
        f"{stream.num_tokens:,} tokens, fingerprint {job.corpus.fingerprint[:12]}"
    )
    if stream.row_tokens is not None:
        content = stream.content
        console.print(
            f"         {content.num_documents:,} conversations in rows of {stream.row_tokens} tokens, "
            f"{content.num_padding / stream.num_tokens:.0%} of them padding; {content.num_cut:,} were cut at their "
            f"end, {content.num_dropped:,} left out since the cut leaves nothing of the assistant's"
        )
    console.print(
        f"[bold]devices[/]  {len(job.plan.devices)} as {degrees}, a global batch of {samples} sequences of "
        f"{job.config.train.seq_len} tokens"
    )


@final
class TrainingDisplay:
    """A progress bar on a terminal, a line now and then elsewhere; then a summary."""

    def __init__(self, job: Job, folder: Path, *, console: Console) -> None:
        self._job = job
        self._folder = folder
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=job.config.train.steps, status="")
        self._speed = 0.0
        self._heldout = ""
        self._last_line = 0.0
        self._goodput: float | None = None
        self._happened: list[JobEvent] = []
        self._outcome: Outcome | None = None
        self._check: Check | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def show(
        self, event: Started | StepRecord | Evaluation | Outcome | Check | JobEvent, *, goodput: float | None = None
    ) -> None:
        """Take notice of what a run reports, and of the useful part of its devices' time so far."""
        self._goodput = goodput
        if isinstance(event, Started):
            self._progress.update(self._task, description="training")
        elif isinstance(event, StepRecord):
            self._show_step(event)
        elif isinstance(event, Evaluation):
            self._show_evaluation(event)
        elif isinstance(event, Outcome):
            self._outcome = event
            self._progress.update(self._task, description="checking the saved model")
        elif isinstance(event, Check):
            self._check = event
        else:
            self._happened.append(event)
            self._console.print(event.line, markup=False, highlight=False)

    def _show_step(self, record: StepRecord) -> None:
        speed = max(record.tokens, 1) / record.time_s
        self._speed = speed if self._speed == 0 else 0.9 * self._speed + 0.1 * speed
        goodput = f"  goodput {self._goodput:.0%}" if self._goodput else ""
        status = f"loss {record.loss:.3f}{self._heldout}  {self._speed:,.0f} tokens/s{goodput}"
        if record.is_skipped:
            status += "  [red]skipped: gradients not finite[/]"
        self._progress.update(self._task, completed=record.step, status=status)
        is_due = time.monotonic() - self._last_line >= LINE_EVERY_S or record.step == self._job.config.train.steps
        if not self._console.is_terminal and is_due:
            self._last_line = time.monotonic()
            total = self._job.config.train.steps
            eta = (total - record.step) * record.tokens / self._speed
            self._console.print(f"step {record.step}/{total}  {status}  ETA {eta:.0f} s")

    def _show_evaluation(self, evaluation: Evaluation) -> None:
        self._heldout = f"  held out {evaluation.heldout_loss:.3f}"
        if not self._console.is_terminal:
            total = self._job.config.train.steps
            self._console.print(f"step {evaluation.step}/{total}  held out {evaluation.heldout_loss:.3f} nats/token")

    def summarise(self) -> None:
        """Losses, text and files."""
        outcome, check = self._outcome, self._check
        if outcome is None or check is None:
            return
        table = Table(show_header=False, box=None, pad_edge=False)
        ended = "stopped early, at" if outcome.is_stopped else "done:"
        table.add_row(
            "training", f"{ended} step {outcome.last_step}, {outcome.num_tokens:,} tokens, {self._speed:,.0f} tokens/s"
        )
        if outcome.num_skipped:
            table.add_row("skipped", f"{outcome.num_skipped} steps with gradients that were not finite")
        for event in self._happened:
            if event.kind in ("recovery", "join", "drain", "corruption", "missed"):
                table.add_row(event.kind, escape(event.line))
        if self._goodput is not None:
            table.add_row(
                "goodput",
                f"{self._goodput:.1%} of all devices' time was useful; see: uneven goodput {escape(str(self._folder))}",
            )
        table.add_row("held-out loss", f"{outcome.heldout_loss:.6f} nats/token on {outcome.num_heldout} sequences")
        if check.reloaded_loss is not None:
            table.add_row(
                "", f"{check.reloaded_loss:.6f} by from_pretrained({escape(repr(str(self._folder / 'model')))})"
            )
        if check.problem is not None:
            table.add_row("not checked", escape(check.problem))
        entropy = self._job.dataset.unigram_entropy
        table.add_row("unigram entropy", f"{entropy:.6f} nats/token, what token frequencies alone give")
        for index, name in enumerate(find_traces(self._folder)):
            table.add_row("" if index else "profile", escape(str(self._folder / name)))
        files = ", ".join(sorted(path.name for path in self._folder.iterdir()))
        table.add_row("files", escape(f"{self._folder}: {files}"))
        self._console.print()
        self._console.print(table)
        if check.text is not None:
            self._console.rule("a sample of its text", style="dim")
            self._console.print(check.text, markup=False)
            self._console.rule(style="dim")
