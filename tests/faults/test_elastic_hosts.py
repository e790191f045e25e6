"""Jobs that outlive their hosts: launchers with their ranks, each in a network of its own, are killed and cut off."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.command import TinyJob, write_tiny_files
from tests.e2e.hosts import UNEVEN, Command, OtherNetwork, finish, other_networks, started

WITHIN_S = 300.0
AT_ONCE_S = 20.0
STEPS = 80
SETTINGS: dict[str, Any] = {
    "train__precision": "fp64",
    "train__steps": STEPS,
    "launch__threads": 1,
    "log__samples": True,
    "elastic__hang_s": 4.0,
}
HERE = socket.gethostname()
MARK = "UNEVEN_TEST_JOB"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    """A folder for all runs of this page."""
    folder = tmp_path_factory.mktemp("elastic-hosts")
    write_tiny_files(folder / "tiny")
    return TinyJob(folder / "tiny", folder)


@pytest.fixture(scope="module")
def networks() -> Iterator[list[OtherNetwork]]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(other_networks(2))
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"other networks can't be made here, which takes root and ip: {error}")
        yield found


@pytest.fixture(scope="module")
def reference(job: TinyJob) -> str:
    """An undisturbed run of one device; it makes the token cache too."""
    result = job.train("--replicas", "1", out="reference", **SETTINGS)
    assert result.returncode == 0, result.stderr
    return "reference"


def launchers(job: TinyJob, networks: Sequence[OtherNetwork], *, out: str, **settings: Any) -> list[list[str]]:
    """The command of each host: the first in this network, the others in theirs; all on one disk."""
    place = ["launch", "--nnodes", str(len(networks) + 1), "--rdzv-endpoint", f"{networks[0].near}:29500"]
    commands = [
        [*UNEVEN, *place, "--node-rank", str(index), "train", "--out", out, *job.settings(**SETTINGS | settings)]
        for index in range(len(networks) + 1)
    ]
    return [commands[0], *(network.inside(each) for network, each in zip(networks, commands[1:], strict=True))]


def environments(job: TinyJob, count: int, *, out: str) -> list[dict[str, str]]:
    """By which each host's processes and temporary files are found."""
    folders = [job.folder / f"{out}-tmp" / str(index) for index in range(count)]
    for folder in folders:
        folder.mkdir(parents=True)
    return [{MARK: f"{out}-{index}", "TMPDIR": str(folder)} for index, folder in enumerate(folders)]


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be growing."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def await_line(path: Path, running: Command, **wanted: Any) -> None:
    """Until a line has these values."""
    deadline = time.monotonic() + WITHIN_S
    while not any(all(line.get(key) == value for key, value in wanted.items()) for line in lines(path)):
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < deadline, (wanted, lines(path)[-3:])
        time.sleep(0.02)


def processes(mark: str) -> list[int]:
    """Those that were started with this mark, and whatever they have started."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
        except OSError:
            continue
    return found


def assert_gone(mark: str, *, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while left := processes(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def assert_follows(job: TinyJob, found: str, needed: str) -> None:
    """The same losses and samples, each step once."""
    runs = [job.metrics(out) for out in (found, needed)]
    assert [line["step"] for line in runs[0]] == list(range(1, STEPS + 1))
    assert [line["samples"] for line in runs[0]] == [line["samples"] for line in runs[1]]
    losses = [[line["loss"] for line in run] for run in runs]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-10)
    assert job.summary(found)["heldout_loss"] == pytest.approx(job.summary(needed)["heldout_loss"], rel=1e-10)


def assert_nothing_left(job: TinyJob, out: str, *, index: int) -> None:
    """Of a host whose launcher ended by itself: no process, and no temporary file."""
    assert_gone(f"{out}-{index}")
    # torch makes an empty cache folder for its compiler whenever it is imported.
    left = os.listdir(job.folder / f"{out}-tmp" / str(index))
    assert [name for name in left if not name.startswith("torchinductor_")] == []


def test_a_job_goes_on_without_a_host_that_was_cut_off_and_one_that_was_killed(
    job: TinyJob, reference: str, networks: list[OtherNetwork]
) -> None:
    """Three hosts of one device each. The second comes back too late, and is fenced; the third is killed."""
    shared_memory = set(os.listdir("/dev/shm"))
    commands = launchers(job, networks, out="run")
    with started(commands, cwd=job.folder, environments=environments(job, 3, out="run")) as running:
        metrics, events = job.folder / "run/metrics.jsonl", job.folder / "run/events.jsonl"
        await_line(metrics, running[0], step=10)
        assert all(len(processes(f"run-{index}")) >= 3 for index in range(3))  # a launcher, its zygote and its rank
        devices = json.loads((job.folder / "run/devices.json").read_text())
        assert [(each["host"], each["state"]) for each in devices] == [(HERE, "healthy")] * 3
        assert all(each["pid"] in processes(f"run-{each['id']}") for each in devices)
        networks[0].set_cable("down")
        await_line(events, running[0], kind="recovery", device=1)
        networks[0].set_cable("up")
        os.kill(running[2].process.pid, signal.SIGKILL)
        first, second, _ = finish(running)
    assert first.code == 0, first.errors
    assert_follows(job, "run", reference)
    assert second.code == 1
    assert f"HostLost: the job went on without host 1 ({HERE}): host 1 ({HERE}) said nothing for 4." in second.errors
    told = [(each["kind"], each.get("device")) for each in lines(events) if each["kind"] != "checkpoint"]
    assert told == [each for i in (1, 2) for each in (("host", None), ("failure", i), ("recovery", i))]
    assert_gone("run-2")
    for index in (0, 1):
        assert_nothing_left(job, "run", index=index)
    assert set(os.listdir("/dev/shm")) <= shared_memory


def test_without_its_first_launcher_a_job_ends_on_all_hosts(job: TinyJob, networks: list[OtherNetwork]) -> None:
    """Before that a rank of the other host was killed, and started again there, and the job went on."""
    faults = ["kill:device=1,step=5", "return:device=1,step=9"]
    commands = launchers(job, networks[:1], out="headless", elastic__faults=faults, train__steps=100_000)
    with started(commands, cwd=job.folder, environments=environments(job, 2, out="headless")) as running:
        events = job.folder / "headless/events.jsonl"
        await_line(events, running[0], kind="join", device=1)
        os.kill(running[0].process.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        (second,) = finish(running[1:])
        assert time.monotonic() - killed_s < AT_ONCE_S
    assert second.code == 1
    assert f"HostLost: host 0 ({HERE}) is gone: it ended without a word" in second.errors
    assert_gone("headless-0")
    assert_nothing_left(job, "headless", index=1)
    kinds = [each["kind"] for each in lines(events) if each["kind"] != "checkpoint"]
    assert kinds == ["fault", "failure", "recovery", "fault", "start", "join"]
    # What was written is whole, and no model seems to be finished.
    assert len(lines(job.folder / "headless/metrics.jsonl")) > 9
    assert {"config.json", "plan.json"} <= set(os.listdir(job.folder / "headless"))
    assert not (job.folder / "headless/model").exists()
