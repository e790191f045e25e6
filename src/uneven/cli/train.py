"""`uneven train`: check everything, train with a progress bar, end with a summary."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from uneven.cli.console import plain_console
from uneven.cli.display import TrainingDisplay, describe_job
from uneven.config import TrainConfig, load_config, parse_degrees, parse_shares
from uneven.errors import ConfigError, Interrupted
from uneven.launch.zygote import warm_up
from uneven.train.job import Design, Job, design_job, prepare_job

train_app = typer.Typer()

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@train_app.command()
def train(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; every key has a default.", metavar="CONFIG.toml")
    ] = None,
    replicas: Annotated[str | None, typer.Option(help="Devices of each replica, as in 4,3; by default 2,1.")] = None,
    shares: Annotated[str | None, typer.Option(help="Shares of the devices in each replica, as in 2:1:1,1:1.")] = None,
    batch_shares: Annotated[str | None, typer.Option(help="Weights of the replicas in the batch, as in 4:3.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan.json that says all about the division.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder, a .gguf, smollm2, or a config.json for random weights.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's new folder; by default runs/DATE-TIME.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu (the default) or cuda.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Trace a few steps of each rank, for Perfetto.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A key of the configuration, as in train.steps=100.")
    ] = None,
) -> None:
    """Train a model on replicas of any tensor-parallel degrees and any shares.

    Without arguments: a small Llama on the source of Python's standard library, on three processes as 2 + 1.
    Ctrl-C ends after the current step and saves the model; a second Ctrl-C ends at once.
    """
    flags = {
        "parallel.replicas": None if replicas is None else parse_degrees(replicas),
        "parallel.shares": None if shares is None else parse_shares(shares),
        "parallel.batch_shares": None if batch_shares is None else _parse_weights(batch_shares),
        "parallel.plan": plan,
        "model": model,
        "device": device,
        "log.profile": profile or None,
    }
    settings = load_config(config, settings=set_ or (), flags=flags)
    folder = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    _check_new(folder)
    console = plain_console()
    try:
        run_job(_prepare(settings, console), folder, console=console)
    except KeyboardInterrupt:
        kept = f"before the model was saved; {folder} keeps metrics and logs" if folder.exists() else "before it began"
        raise Interrupted(f"training was ended {kept}") from None


def _check_new(folder: Path) -> None:
    """Raise ConfigError unless a folder of this name could be made."""
    if folder.exists():
        raise ConfigError(f"--out {folder}: exists already; a run needs a new folder")
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        kind = "can't be written to" if parent.is_dir() else "is no folder"
        raise ConfigError(f"--out {folder}: can't be made, since {parent} {kind}")


def _parse_weights(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(":")]
    except ValueError:
        raise ConfigError(f"--batch-shares {text}: expected whole numbers, one for each replica, as in 4:3") from None


def _prepare(settings: TrainConfig, console: Console) -> Job:
    design: Design = design_job(settings, announce=partial(console.print, markup=False, soft_wrap=True))
    # The ranks' process loads torch while this one reads the data.
    warm_up(f"transformers.models.{design.spec.family}.modeling_{design.spec.family}", "uneven.train.program")
    with console.status("reading the data") as status:
        return prepare_job(
            design,
            progress=lambda done, total: status.update(f"reading the data: {done / 1e6:.0f} of {total / 1e6:.0f} MB"),
        )


def run_job(job: Job, folder: Path, *, console: Console) -> None:
    """Train `job` in a new `folder`, and show it on `console`."""
    # Here and not at the top: it loads torch, which takes seconds that help and errors should not cost.
    from uneven.train.run import TrainingRun

    describe_job(job, console)
    run = TrainingRun(job, folder)
    display = TrainingDisplay(job, folder, console=console)
    with _stop_on_signals(run.request_stop, console=console), display:
        for event in run:
            display.show(event)
    display.summarise()


@contextmanager
def _stop_on_signals(request_stop: Callable[[], None], *, console: Console) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP asks for a stop, the second one interrupts."""

    def stop(number: int, _: FrameType | None) -> None:
        for again in STOP_SIGNALS:
            signal.signal(again, signal.default_int_handler)
        console.print("stopping after this step; once more to end at once")
        request_stop()

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
