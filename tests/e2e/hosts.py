"""Several hosts on this machine: processes of the command line, each in a network namespace where that is possible."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TIMEOUT_S = 180
UNEVEN = (sys.executable, "-m", "uneven")
FOREIGN = ("SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
"""Variables that whoever runs the tests may have for reasons of their own."""


@dataclass
class Command:
    """A command as it runs, and its output once it has ended."""

    process: subprocess.Popen[str]
    output: str = ""
    errors: str = ""

    @property
    def code(self) -> int:
        return self.process.returncode


@contextmanager
def started(
    commands: Sequence[Sequence[str]], *, cwd: Path, environments: Sequence[Mapping[str, str]] | None = None
) -> Iterator[list[Command]]:
    """Commands that run side by side; what still runs after the block is killed."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    running = []
    try:
        for command, variables in zip(commands, environments or [{}] * len(commands), strict=True):
            process = subprocess.Popen(
                command, cwd=cwd, env=plain | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            running.append(Command(process))
        yield running
    finally:
        for each in running:
            each.process.kill()
            each.process.communicate()


def finish(running: Sequence[Command]) -> list[Command]:
    """The commands when all have ended by themselves."""
    for each in running:
        each.output, each.errors = each.process.communicate(timeout=TIMEOUT_S)
    return list(running)


def run(
    commands: Sequence[Sequence[str]], *, cwd: Path, environments: Sequence[Mapping[str, str]] | None = None
) -> list[Command]:
    with started(commands, cwd=cwd, environments=environments) as running:
        return finish(running)


def slurm(index: int, count: int, *, job: int, node: str) -> dict[str, str]:
    """The variables of one task of a step on one node."""
    values = {"PROCID": index, "NTASKS": count, "LOCALID": index, "JOB_ID": job, "STEP_ID": 0, "STEP_NODELIST": node}
    return {f"SLURM_{key}": str(value) for key, value in values.items()}


def rank_of(log: Path) -> int:
    """The process whose output is this log of a rank."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.path.samefile(f"/proc/{pid}/fd/1", log):
                return int(pid)
        except OSError:
            continue
    raise AssertionError(f"no process writes {log}")


@dataclass(frozen=True)
class OtherNetwork:
    """A network namespace on a common wire with this one, as of another machine; `near` is this end, `far` its own."""

    name: str
    near: str
    far: str

    def inside(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def set_cable(self, state: Literal["up", "down"]) -> None:
        """Pull its cable, or put it in again."""
        ip("-n", self.name, "link", "set", "cable", state)


@contextmanager
def other_networks(count: int) -> Iterator[list[OtherNetwork]]:
    """Raises OSError or CalledProcessError where this machine does not allow it."""
    pid = os.getpid()
    subnet = f"198.{18 + pid // 256 % 2}.{pid % 256}"
    networks = [OtherNetwork(f"uneven-{pid}-{i}", f"{subnet}.1", f"{subnet}.{i + 2}") for i in range(count)]
    bridge = f"uv{pid}"
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for index, network in enumerate(networks):
            near = f"{bridge}n{index}"
            ip("netns", "add", network.name)
            ip("link", "add", near, "type", "veth", "peer", "name", "cable", "netns", network.name)
            ip("link", "set", near, "master", bridge)
            ip("link", "set", near, "up")
            ip("-n", network.name, "addr", "add", f"{network.far}/24", "dev", "cable")
            ip("-n", network.name, "link", "set", "lo", "up")
            network.set_cable("up")
        yield networks
    finally:
        # The cables go with them.
        for words in (*(["netns", "del", network.name] for network in networks), ["link", "del", bridge]):
            subprocess.run(["ip", *words], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)
