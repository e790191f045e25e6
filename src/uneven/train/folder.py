"""A run's folder: everything that the launcher writes there, in the order in which it becomes known.

It is written by the launcher and not by a rank, because any rank may die; a rank writes the weights only.
"""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, final

from uneven.checkpoint.folder import prune
from uneven.draw import draw_loss, draw_plan
from uneven.elastic.inbox import FOLDER as REQUESTS
from uneven.errors import ConfigError, InputError
from uneven.goodput import Event
from uneven.goodput.book import read_lines
from uneven.goodput.events import FILE as EVENTS
from uneven.modelspec import BytesRead
from uneven.train.job import Job, keep_generation_config
from uneven.train.records import DEVICES, PARTIAL, TOKENIZER, Check, Evaluation, Outcome, StepRecord, find_traces
from uneven.train.tensorboard import EventFiles

TENSORBOARD = "tensorboard"
"""The folder of a run where TensorBoard's event files lie."""
METRICS = "metrics.jsonl"


@final
class RunFolder:
    """The folder of one run; as a context it holds open what is written line by line.

    A new one, or with `resumed_at` that of a run that is gone on with after so many steps.
    """

    def __init__(self, job: Job, path: Path, *, resumed_at: int | None = None) -> None:
        self.job = job
        self.path = path
        self._resumed_at = resumed_at
        self.furthest = 0
        self._steps: list[StepRecord] = []
        self._heldout: list[Evaluation] = []
        self._bytes_read: dict[int, BytesRead] = {}
        self._metrics: IO[str] | None = None
        self._events: IO[str] | None = None
        self._tensorboard: EventFiles | None = None

    @contextmanager
    def open(self) -> Iterator["RunFolder"]:
        """Make it. Gone again if the ranks refuse their input before a step, and never with half a model."""
        if self._resumed_at is None:
            self._lay_out()
        else:
            self._recall(self._resumed_at)
        try:
            with ExitStack() as stack:
                self._metrics = stack.enter_context((self.path / METRICS).open("a"))
                self._events = stack.enter_context((self.path / EVENTS).open("a"))
                if self._resumed_at is not None:
                    self.roll_back(self._resumed_at)
                if self.job.config.log.tensorboard:
                    self._tensorboard = stack.enter_context(EventFiles(self.path / TENSORBOARD))
                yield self
        except InputError:
            if not self._steps and self._resumed_at is None:
                shutil.rmtree(self.path)
            raise
        finally:
            for name in (PARTIAL, REQUESTS):
                shutil.rmtree(self.path / name, ignore_errors=True)

    def _lay_out(self) -> None:
        """Make the folder and write what is known before the first step."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(f"--out {self.path}: exists already; a run needs a new folder") from None
        except OSError as error:
            raise ConfigError(f"--out {self.path}: can't make this folder: {error.strerror}") from None
        self._describe()

    def _recall(self, step: int) -> None:
        """Take up what an earlier launcher has left: lines of metrics, of which a killed one may have cut the last."""
        metrics = self.path / METRICS
        for _, line in read_lines(metrics) if metrics.exists() else ():
            samples = line.pop("samples", None)
            numbers = {key: math.nan if value is None else value for key, value in line.items()}
            if "heldout_loss" in numbers:
                self._heldout.append(Evaluation(**numbers))
            else:
                is_skipped = numbers.pop("skipped")
                self._steps.append(StepRecord(**numbers, is_skipped=is_skipped, samples=samples and tuple(samples)))
        self.furthest = self.last_step
        for name in (PARTIAL, REQUESTS):
            shutil.rmtree(self.path / name, ignore_errors=True)
        prune(self.path, keep=self.job.config.checkpoint.keep, keep_every_s=self.job.config.checkpoint.keep_every_s)
        self._describe()

    def _describe(self) -> None:
        (self.path / PARTIAL).mkdir()
        (self.path / REQUESTS).mkdir()
        tokenizer = self.path / TOKENIZER
        tokenizer.mkdir(exist_ok=True)
        self.job.design.tokenizer.save(tokenizer)
        keep_generation_config(self.job, tokenizer)
        _write_json(self.path / "config.json", self.job.config.model_dump(mode="json"))
        _write_json(self.path / "data.json", self._describe_data())
        (self.path / "plan.json").write_text(self.job.plan.dumps())
        draw_plan(self.job.plan, self.path / "plan.png")

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

    @property
    def last_step(self) -> int:
        """The last step that is told of."""
        return self._steps[-1].step if self._steps else 0

    @property
    def num_tokens(self) -> int:
        """Targets that the model has learnt from."""
        return sum(record.tokens for record in self._steps if not record.is_skipped)

    def read(self, device: int, read: BytesRead) -> None:
        """Take note of what a rank has read of the weights."""
        self._bytes_read[device] = read

    def log(self, record: StepRecord | Evaluation) -> bool:
        """Add a line to the metrics; False for what is there already: after a recovery things are said again."""
        known: Sequence[StepRecord | Evaluation] = self._steps if isinstance(record, StepRecord) else self._heldout
        if known and record.step <= known[-1].step:
            return False
        if isinstance(record, StepRecord):
            self._steps.append(record)
        else:
            self._heldout.append(record)
        self._write_line(record)
        if self._tensorboard is not None:
            self._tensorboard.add(record)
        return True

    def roll_back(self, step: int) -> None:
        """Forget all after a step: the job has gone back to it."""
        self._steps = [record for record in self._steps if record.step <= step]
        self._heldout = [record for record in self._heldout if record.step <= step]
        assert self._metrics is not None
        self._metrics.seek(0)
        self._metrics.truncate()
        for record in sorted([*self._steps, *self._heldout], key=lambda record: record.step):
            self._write_line(record)

    def _write_line(self, record: StepRecord | Evaluation) -> None:
        line = {key: _finite(value) for key, value in dataclasses.asdict(record).items()}
        if isinstance(record, StepRecord):
            line["skipped"] = line.pop("is_skipped")
            if record.samples is None:
                del line["samples"]
        assert self._metrics is not None
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()

    def tell(self, event: Event) -> None:
        """Add a line to the events."""
        assert self._events is not None
        self._events.write(json.dumps(event.to_json()) + "\n")
        self._events.flush()

    def show_devices(self, devices: Sequence[Mapping[str, Any]]) -> None:
        """Write who is there now; whoever reads it finds a whole file."""
        draft = self.path / f".{DEVICES}"
        draft.write_text(json.dumps(devices, indent=1) + "\n")
        os.replace(draft, self.path / DEVICES)

    def conclude(self, outcome: Outcome, check: Check, *, time_s: float) -> None:
        entropy = self.job.dataset.unigram_entropy
        summary = {
            "steps": outcome.last_step,
            "skipped_steps": outcome.num_skipped,
            "stopped_early": outcome.is_stopped,
            "tokens": self.num_tokens,
            "time_s": time_s,
            "heldout_loss": _finite(outcome.heldout_loss),
            "heldout_sequences": outcome.num_heldout,
            "reloaded_heldout_loss": _finite(check.reloaded_loss),
            "unigram_entropy": entropy,
            "sample": check.text,
            "check_problem": check.problem,
            "bytes_read": {device: dataclasses.asdict(read) for device, read in sorted(self._bytes_read.items())},
            "profile": find_traces(self.path),
        }
        _write_json(self.path / "summary.json", summary)
        heldout = [(each.step, each.heldout_loss) for each in self._heldout] or [
            (outcome.last_step, outcome.heldout_loss)
        ]
        draw_loss(
            self.path / "loss.png",
            curves={
                "training": [(record.step, record.loss) for record in self._steps],
                "held out": heldout,
            },
            references={"unigram entropy": entropy},
        )


def _finite(value: Any) -> Any:
    """None for a number that JSON can't hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
