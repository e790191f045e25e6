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

from uneven.checkpoint.folder import Checkpoint, newest
from uneven.cli.console import plain_console
from uneven.cli.display import TrainingDisplay, describe_job
from uneven.config import TrainConfig, load_config, parse_degrees, parse_shares
from uneven.errors import ConfigError, Interrupted
from uneven.launch.agreement import agree
from uneven.launch.environment import static_job
from uneven.launch.site import Place, Site, join
from uneven.launch.zygote import warm_up
from uneven.train.fingerprint import data_fingerprint, design_fingerprint
from uneven.train.job import Design, Job, design_job, prepare_job
from uneven.train.records import CONFIG, Started

train_app = typer.Typer()

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@train_app.command()
def train(
    context: typer.Context,
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
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Go on with a run from its newest checkpoint, under any division."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu (the default) or cuda.")] = None,
    survive: Annotated[
        int | None, typer.Option(min=0, max=4, help="Deaths after which the job must fit into elastic.memory.")
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="What is to fail on purpose, as in kill:device=2,step=60; may be repeated.")
    ] = None,
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
        "elastic.survive": survive,
        "elastic.faults": fault,
    }
    checkpoint = None
    if resume is not None:
        checkpoint, config = _find_checkpoint(resume, given=config or out), resume / CONFIG
        flags["elastic.faults"] = fault or []
    settings = load_config(config, settings=set_ or (), flags=flags)
    _run(settings, context.obj or Place.of(static_job()), out=resume or out, checkpoint=checkpoint)


def _find_checkpoint(run: Path, *, given: Path | None) -> Checkpoint:
    """The newest one of a run that is to go on; it has its own configuration and folder."""
    if given is not None:
        raise ConfigError(f"--resume {run}: goes on with that run's configuration, in its folder; leave out {given}")
    return newest(run)


def _run(settings: TrainConfig, place: Place, *, out: Path | None, checkpoint: Checkpoint | None) -> None:
    """Train at a place among other hosts, in the folder `out`: a new one, or that of the checkpoint."""
    folder: Path | None = None
    try:
        console = _greet(place)
        with join(place, timeout_s=settings.launch.timeout_s) as site:
            folder = out if out and checkpoint else _choose_folder(out, site)
            job = _prepare(_with_division(settings, site), site, console=console)
            if checkpoint is not None:
                checkpoint.manifest.check_model(job.plan.structure, where=str(checkpoint.folder))
            run_job(job, folder, site=site, console=console, checkpoint=checkpoint)
    except KeyboardInterrupt:
        kept = (
            f"before the model was saved; {folder} keeps metrics and logs"
            if folder and folder.exists()
            else "before it began"
        )
        raise Interrupted(f"training was ended {kept}") from None


def _greet(place: Place) -> Console:
    """Where to print: one process of a job shows it."""
    meeting = place.meeting
    if meeting.count > 1 and not place.is_rank:
        plain_console().print(f"host {meeting.index} of {meeting.count}, meeting at {meeting.place}", markup=False)
    return plain_console(quiet=meeting.index > 0)


def _choose_folder(out: Path | None, site: Site) -> Path:
    """The run's folder: the one given, or a name that the first host finds."""
    folder = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    if site.is_first:
        _check_new(folder)
    name = site.peers.exchange(str(folder))[0]
    return out or Path(name)


def _with_division(settings: TrainConfig, site: Site) -> TrainConfig:
    """The settings with a replica for each host, if they do not say how to divide."""
    parallel = settings.parallel
    degrees = site.default_degrees()
    if degrees is None or (parallel.replicas, parallel.shares, parallel.plan) != (None, None, None):
        return settings
    return settings.model_copy(update={"parallel": parallel.model_copy(update={"replicas": degrees})})


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


def _prepare(settings: TrainConfig, site: Site, *, console: Console) -> Job:
    """The job, the same on every host, which is checked before and after the data are read."""
    design: Design = design_job(settings, announce=partial(console.print, markup=False, soft_wrap=True))
    site.devices_here(design.plan.devices)
    agree(site.peers, design_fingerprint(design))
    if not site.is_rank:
        # The ranks' process loads torch while this one reads the data.
        module = design.spec.family.removesuffix("_text")
        warm_up(f"transformers.models.{module}.modeling_{module}", "uneven.train.program")
    # The first process of a host makes the token cache, which the others use.
    job = _read_data(design, console) if site.local_rank == 0 else None
    site.peers.exchange("read")
    job = job or _read_data(design, console)
    agree(site.peers, data_fingerprint(job))
    return job


def _read_data(design: Design, console: Console) -> Job:
    with console.status("reading the data") as status:
        return prepare_job(
            design,
            progress=lambda done, total: status.update(f"reading the data: {done / 1e6:.0f} of {total / 1e6:.0f} MB"),
        )


def run_job(job: Job, folder: Path, *, site: Site, console: Console, checkpoint: Checkpoint | None = None) -> None:
    """Train `job` in a new `folder`, or on from a checkpoint in its folder, and show it on `console`."""
    # Here and not at the top: it loads torch, which takes seconds that help and errors should not cost.
    from uneven.train.run import TrainingRun

    describe_job(job, console)
    if checkpoint is not None:
        console.print(
            f"resume   {checkpoint.folder}: after step {checkpoint.manifest.step}", markup=False, soft_wrap=True
        )
    run = TrainingRun(job, folder, site=site, checkpoint=checkpoint)
    display = TrainingDisplay(job, folder, console=console)
    with _stop_on_signals(run.request_stop, console=console), display:
        for event in run:
            if isinstance(event, Started) and run.metrics_port is not None:
                console.print(f"metrics  http://127.0.0.1:{run.metrics_port}/metrics", markup=False)
            display.show(event, goodput=run.goodput)
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
