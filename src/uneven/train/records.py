"""What a training job reports: the messages that cross from ranks to the launcher. Loads no torch."""

from dataclasses import dataclass
from pathlib import Path

PROFILE = "profile"
"""The folder of a run where each rank's trace lies, where traces were asked for."""
PARTIAL, MODEL = "model.partial", "model"
"""Folders of a run: the model while it is being written, and once it is whole."""
DEVICES = "devices.json"
"""Who is there, in a run's folder."""
STOP = "stop"
"""The launcher's command to end after the current step."""


@dataclass(frozen=True, slots=True)
class Started:
    """The ranks have built the model."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One committed step. `time_s` is its duration; `samples` the sequences used, by global sample number."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    time_s: float
    is_skipped: bool
    samples: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out loss after a step, and how long it took."""

    step: int
    heldout_loss: float
    time_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended: after `last_step`, of which `num_skipped` had non-finite gradients; from `num_tokens` targets
    of the others the model has learnt, which the launcher counts."""

    last_step: int
    heldout_loss: float
    num_heldout: int
    num_skipped: int
    is_stopped: bool
    nonfinite_in_row: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """The saved folder, loaded by plain transformers: its held-out loss, text that it generated, or why not."""

    reloaded_loss: float | None = None
    text: str | None = None
    problem: str | None = None


def trace_file(folder: Path, device: int) -> Path:
    """Where the rank of a device writes its trace in a run's folder."""
    return folder / PROFILE / f"rank-{device}.json"


def find_traces(folder: Path) -> list[str]:
    """The traces in a run's folder, by their names in it."""
    return sorted(path.relative_to(folder).as_posix() for path in (folder / PROFILE).glob("rank-*.json"))
