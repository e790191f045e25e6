"""A run's numbers as TensorBoard's event files.

The package tensorboardX is imported only when they are asked for.
"""

import importlib.util
from pathlib import Path
from types import TracebackType
from typing import Self, final

from uneven.errors import ConfigError
from uneven.train.records import Evaluation, StepRecord

PACKAGE = "tensorboardX"


def check_tensorboard() -> None:
    """Raise ConfigError unless event files can be written."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"log.tensorboard needs the package {PACKAGE}, which is not installed; "
            "install it with: pip install 'uneven[tensorboard]'"
        )


@final
class EventFiles:
    """Event files in a new folder."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def add(self, event: StepRecord | Evaluation) -> None:
        """Its numbers, at its step."""
        if isinstance(event, Evaluation):
            values = {"heldout/loss": event.heldout_loss}
        else:
            values = {
                "train/loss": event.loss,
                "train/grad_norm": event.grad_norm,
                "train/lr": event.lr,
                "train/tokens": event.tokens,
                "train/tokens_per_s": event.tokens / event.time_s,
            }
        for name, value in values.items():
            self._writer.add_scalar(name, value, event.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._writer.close()
