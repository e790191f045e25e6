"""What a training job reports: the messages that cross from ranks to the launcher. Loads no torch."""

from dataclasses import dataclass


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
class Outcome:
    """How training ended: after `last_step`, of which `num_skipped` had non-finite gradients."""

    last_step: int
    num_skipped: int
    heldout_loss: float
    num_heldout: int
    is_stopped: bool
    nonfinite_in_row: int


@dataclass(frozen=True, slots=True)
class Check:
    """The saved folder, loaded by plain transformers: its held-out loss, text that it generated, or why not."""

    reloaded_loss: float | None = None
    text: str | None = None
    problem: str | None = None
