"""`uneven drain` and `uneven join`: let a device of a running job leave, or start its process again."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from uneven.cli.console import plain_console
from uneven.elastic.inbox import Request, put
from uneven.errors import ConfigError, RankFailed
from uneven.train.records import DEVICES

membership_app = typer.Typer()

TAKEN_S = 10.0
"""How long a launcher that lives may take to take a request."""
HAPPENED_S = 600.0
"""How long it may take then: a device that joins loads a model, and a step boundary has to come."""
POLL_S = 0.1
RUNS = Path("runs")

RunOption = Annotated[
    Path | None, typer.Option(metavar="RUN", help="The folder of the running job; by default the newest one in runs/.")
]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Whether to wait until it has happened.")]


@membership_app.command()
def drain(
    device: Annotated[int, typer.Option(min=0, help="The device that is to leave.")],
    run: RunOption = None,
    wait: WaitOption = True,
) -> None:
    """Let a device leave at the next step boundary: no work is repeated."""
    run = run or _newest()
    found = _devices(run)
    if device not in found or found[device]["state"] == "failed":
        states = ", ".join(f"{number} {each['state']}" for number, each in sorted(found.items()))
        raise ConfigError(f"--device {device}: not in the job of {run}, whose devices are {states}")
    _ask(run, Request("drain", device))
    if wait:
        _await(run, device, states=(None,), saying=f"device {device} leaves")
    plain_console().print(f"device {device} {'has left' if wait else 'is asked to leave'} {run}", markup=False)


@membership_app.command()
def join(
    device: Annotated[
        int | None, typer.Option(min=0, help="The device that returns; by default all that have failed or left.")
    ] = None,
    run: RunOption = None,
    wait: WaitOption = True,
) -> None:
    """Start the process of a device that has failed or left; it joins at a step boundary."""
    run = run or _newest()
    found = _devices(run)
    absent = [number for number in _home(run) if number not in found or found[number]["state"] == "failed"]
    if device is not None and device not in absent:
        raise ConfigError(f"--device {device}: can't join the job of {run}; absent are {absent or 'none'}")
    devices = absent if device is None else [device]
    if not devices:
        raise ConfigError(f"no device of the job of {run} is absent")
    for number in devices:
        _ask(run, Request("join", number))
    for number in devices if wait else ():
        _await(run, number, states=("healthy",), saying=f"device {number} joins")
    plain_console().print(f"devices {devices} {'have joined' if wait else 'are asked to join'} {run}", markup=False)


def _newest() -> Path:
    runs = sorted(RUNS.glob(f"*/{DEVICES}"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ConfigError(f"--run: there is no run in {RUNS}/ here; give the folder of the running job")
    return runs[-1].parent


def _devices(run: Path) -> dict[int, dict[str, Any]]:
    """Who is there, by id."""
    try:
        return {each["id"]: each for each in json.loads((run / DEVICES).read_text())}
    except OSError as error:
        raise ConfigError(f"--run {run}: not the folder of a running job: {DEVICES}: {error.strerror}") from None


def _home(run: Path) -> list[int]:
    """All devices that the job began with."""
    plan = json.loads((run / "plan.json").read_text())
    return [device for replica in plan["replicas"] for device in replica["devices"]]


def _ask(run: Path, request: Request) -> None:
    try:
        file = put(run, request)
    except OSError:
        raise ConfigError(f"--run {run}: its job has ended, or does not outlive its devices") from None
    deadline = time.monotonic() + TAKEN_S
    while file.exists():
        if time.monotonic() > deadline:
            file.unlink(missing_ok=True)
            raise RankFailed(
                f"the launcher of {run} has not taken the request in {TAKEN_S:g} s: it is gone, or stopped"
            )
        time.sleep(POLL_S)


def _await(run: Path, device: int, *, states: tuple[str | None, ...], saying: str) -> None:
    """Until a device is in one of some states, None for not being there."""
    deadline = time.monotonic() + HAPPENED_S
    with plain_console().status(saying):
        while time.monotonic() < deadline:
            found = _devices(run).get(device)
            state = found["state"] if found else None
            if state in states:
                return
            if state == "failed" and states == (None,):
                raise RankFailed(f"device {device} has failed before it could leave")
            if not (run / "requests").is_dir():
                raise RankFailed(f"the job of {run} has ended before: {saying}")
            time.sleep(POLL_S)
    raise RankFailed(f"{saying}: this has not happened within {HAPPENED_S:g} s; {run / DEVICES} says who is there")
