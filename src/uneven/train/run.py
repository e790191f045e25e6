"""The launcher's side of a training job: start the ranks, keep the run folder, end cleanly.

The folder is written here and not by a rank, because any rank may die; a rank writes the weights only.
"""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, final

import torch

from uneven.comm import Transport, World
from uneven.draw import draw_loss, draw_plan
from uneven.errors import ConfigError, InputError, NonFiniteGradient
from uneven.launch.inline import InlineRank
from uneven.launch.launcher import Launcher, LaunchSettings
from uneven.launch.rank import Mailbox
from uneven.launch.site import Site
from uneven.modelspec import BytesRead
from uneven.train.job import Job
from uneven.train.records import MODEL, PARTIAL, STOP, Check, Evaluation, Outcome, Started, StepRecord, find_traces
from uneven.train.tensorboard import EventFiles

Event = Started | StepRecord | Evaluation | Outcome | Check
TENSORBOARD = "tensorboard"
"""The folder of a run where TensorBoard's event files lie."""


@final
class TrainingRun:
    """One run of a job in a new folder. Iterating over it trains, and gives what happens as it happens.

    On several hosts each has one; the first writes the folder and hears what happens, the others add their ranks' logs.
    """

    def __init__(self, job: Job, folder: Path, *, site: Site | None = None) -> None:
        self.job = job
        self.folder = folder
        self.site = site or Site()
        self._transport = choose_transport(job, self.site)
        self._launcher: Launcher | InlineRank | None = None
        self._wants_stop = False
        self._curve: list[tuple[int, float]] = []
        self._bytes_read: dict[int, BytesRead] = {}
        self._heldout: list[tuple[int, float]] = []

    def request_stop(self) -> None:
        """Let every rank end after its current step, and save. May be called from a signal handler."""
        self._wants_stop = True
        if self._launcher is not None:
            self._launcher.tell(STOP)

    def __iter__(self) -> Iterator[Event]:
        """Train. Raises RankFailed, or NonFiniteGradient once the model has been saved."""
        config = self.job.config
        settings = LaunchSettings(
            self._transport,
            num_threads=config.launch.threads,
            logs=None if self.site.is_rank else self.folder / "logs",
            site=self.site,
        )
        ranks = InlineRank if self.site.is_rank else Launcher
        has_events = config.log.tensorboard and self.site.is_first
        began = time.perf_counter()
        outcome: Outcome | None = None
        with (
            self._new_folder() as metrics,
            EventFiles(self.folder / TENSORBOARD) if has_events else nullcontext() as event_files,
            ranks(
                _train_rank, (self.job, self.folder), devices=self.job.plan.devices, settings=settings
            ) as self._launcher,
        ):
            if self._wants_stop:
                self._launcher.tell(STOP)
            for message in self._launcher.messages():
                if message.kind != "post":
                    continue
                if isinstance(message.payload, BytesRead):
                    self._bytes_read[message.device] = message.payload
                    continue
                event: Event = message.payload
                if isinstance(event, StepRecord | Evaluation):
                    self._log(event, metrics)
                    if event_files is not None:
                        event_files.add(event)
                elif isinstance(event, Outcome):
                    outcome = event
                    self._conclude(event, Check(), time_s=time.perf_counter() - began)
                elif isinstance(event, Check) and outcome is not None:
                    self._conclude(outcome, event, time_s=time.perf_counter() - began)
                yield event
            # The job ends on all hosts together: till then each hears of what fails on another.
            self.site.peers.exchange("done")
        if outcome is not None and outcome.nonfinite_in_row >= config.train.max_nonfinite:
            raise NonFiniteGradient(
                f"stopped after step {outcome.last_step}: gradients were not finite in {outcome.nonfinite_in_row} "
                f"steps in a row (train.max_nonfinite); the model after the last update is in {self.folder / MODEL}; "
                f"a lower train.lr (now {config.train.lr:g}) is the usual remedy"
            )

    @contextmanager
    def _new_folder(self) -> Iterator[IO[str] | None]:
        """The run's folder and metrics; gone again if the ranks refuse their input before a step, and never with half a
        model. It is the first host's alone.
        """
        if not self.site.is_first:
            yield None
            return
        self._lay_out()
        try:
            with (self.folder / "metrics.jsonl").open("w") as metrics:
                yield metrics
        except InputError:
            if not self._curve:
                shutil.rmtree(self.folder)
            raise
        finally:
            shutil.rmtree(self.folder / PARTIAL, ignore_errors=True)

    def _lay_out(self) -> None:
        """Make the folder and write what is known before the first step."""
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(f"--out {self.folder}: exists already; a run needs a new folder") from None
        except OSError as error:
            raise ConfigError(f"--out {self.folder}: can't make this folder: {error.strerror}") from None
        (self.folder / PARTIAL).mkdir()
        _write_json(self.folder / "config.json", self.job.config.model_dump(mode="json"))
        _write_json(self.folder / "data.json", self._describe_data())
        (self.folder / "plan.json").write_text(self.job.plan.dumps())
        draw_plan(self.job.plan, self.folder / "plan.png")

    def _describe_data(self) -> dict[str, Any]:
        corpus, dataset = self.job.corpus, self.job.dataset
        stream = dataset.train.stream
        return {
            "corpus": corpus.description,
            "corpus_fingerprint": corpus.fingerprint,
            "heldout_corpus": None if self.job.heldout is None else self.job.heldout.description,
            "files": len(corpus.documents),
            "bytes": corpus.num_bytes,
            "documents": stream.content.num_documents,
            "repeated_documents": stream.num_repeated,
            "cut_documents": stream.content.num_cut,
            "dropped_documents": stream.content.num_dropped,
            "tokenizer": self.job.design.tokenizer.source,
            "tokenizer_fingerprint": self.job.design.tokenizer.fingerprint,
            "tokens": stream.num_tokens,
            "padding_tokens": stream.content.num_padding,
            "train_sequences": dataset.num_train,
            "heldout_sequences": dataset.num_heldout,
            "unigram_entropy": dataset.unigram_entropy,
        }

    def _log(self, event: StepRecord | Evaluation, metrics: IO[str]) -> None:
        line = {key: _finite(value) for key, value in dataclasses.asdict(event).items()}
        if isinstance(event, StepRecord):
            line["skipped"] = line.pop("is_skipped")
            if event.samples is None:
                del line["samples"]
            self._curve.append((event.step, event.loss))
        else:
            self._heldout.append((event.step, event.heldout_loss))
        metrics.write(json.dumps(line) + "\n")
        metrics.flush()

    def _conclude(self, outcome: Outcome, check: Check, *, time_s: float) -> None:
        entropy = self.job.dataset.unigram_entropy
        summary = {
            "steps": outcome.last_step,
            "skipped_steps": outcome.num_skipped,
            "stopped_early": outcome.is_stopped,
            "tokens": outcome.num_tokens,
            "time_s": time_s,
            "heldout_loss": _finite(outcome.heldout_loss),
            "heldout_sequences": outcome.num_heldout,
            "reloaded_heldout_loss": _finite(check.reloaded_loss),
            "unigram_entropy": entropy,
            "sample": check.text,
            "check_problem": check.problem,
            "bytes_read": {device: dataclasses.asdict(read) for device, read in sorted(self._bytes_read.items())},
            "profile": find_traces(self.folder),
        }
        _write_json(self.folder / "summary.json", summary)
        draw_loss(
            self.folder / "loss.png",
            curves={
                "training": self._curve,
                "held out": self._heldout or [(outcome.last_step, outcome.heldout_loss)],
            },
            references={"unigram entropy": entropy},
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


def _finite(value: Any) -> Any:
    """None for a number that JSON can't hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
