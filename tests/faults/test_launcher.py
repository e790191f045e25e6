"""Ranks that raise, die or hang, and a launcher that dies: with real processes that are really killed."""

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from uneven.comm import Transport, World
from uneven.errors import ConfigError, InputError, RankFailed, UnevenError
from uneven.launch.launcher import Launcher, LaunchSettings
from uneven.launch.rank import Mailbox
from uneven.launch.run import launch

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE_S = 10.0
"""Far below the transport's timeout, and well above what a loaded machine needs."""
SETTINGS = LaunchSettings(Transport(timeout_s=120.0), num_threads=1)


# Programs


def raise_on_one(world: World, mailbox: Mailbox, culprit: int) -> None:
    """One rank raises; the others wait for it in a collective, and fail in their turn or would wait for long."""
    group = world.everyone(purpose="test")
    group.all_reduce(torch.ones(1))
    mailbox.post("ready")
    mailbox.wait()
    if world.device == culprit:
        raise ZeroDivisionError(f"boom on {culprit}")
    group.all_reduce(torch.ones(1))


def divide_by_zero(world: World) -> float:
    return world.device / 0


def refuse_input(world: World, kind: type[UnevenError], everywhere: bool) -> None:
    if everywhere or world.device == 1:
        raise kind("key 'lr': found -1, expected a positive number")
    world.everyone(purpose="test").all_reduce(torch.ones(1))


def wait_in_a_collective(world: World, mailbox: Mailbox, absent: int) -> None:
    """All but one rank are blocked in an all-reduce; that one waits for a command."""
    group = world.everyone(purpose="test")
    group.all_reduce(torch.ones(1))
    mailbox.post("ready")
    if world.device == absent:
        mailbox.wait()
    group.all_reduce(torch.ones(1))


def near(world: World, first: int) -> bool:
    return world.device in (first, first + 1) and first + 1 < len(world.devices)


def finish_in_reverse(world: World) -> str:
    """A rank returns once the one after it is about to, and no rank while another still connects to it."""
    group = world.everyone(purpose="test")
    pairs = {first: world.group((first, first + 1), purpose="test") for first in range(4) if near(world, first)}
    group.all_reduce(torch.ones(1))
    for _, pair in sorted(pairs.items(), reverse=True):
        pair.all_reduce(torch.ones(1))
    return f"result of {world.device}"


def print_and_return(world: World) -> None:
    print(f"hello from {world.device}")
    print(f"trouble on {world.device}", file=sys.stderr)
    os.system(f"echo native output of {world.device}")


def print_and_exit(world: World) -> None:
    print("last words")
    if world.device == 1:
        sys.stdout.flush()
        os._exit(3)
    world.everyone(purpose="test").all_reduce(torch.ones(1))


def return_a_function(world: World) -> Callable[[], int]:
    return lambda: world.device


def raise_an_error_that_does_not_pickle(world: World) -> None:
    error = UnevenError("the cause")
    error.payload = lambda: None
    raise error


def echo(world: World, mailbox: Mailbox) -> list[Any]:
    return [mailbox.wait(), mailbox.wait()]


# What is left


def listening_ports() -> set[int]:
    """TCP ports on which this process listens."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as each:
                is_inet = each.family in (socket.AF_INET, socket.AF_INET6)
                if is_inet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(each.getsockname()[1])
        except OSError:
            continue  # closed since it was listed
    return found


def has_ended(pidfd: int, *, within_s: float) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(within_s * 1000))


@contextmanager
def nothing_left(job: Launcher) -> Iterator[None]:
    """Start the job; after the block its processes are gone and nothing listens that did not before."""
    with job:
        pidfds = {pid: os.pidfd_open(pid) for pid in job.pids.values()}
        try:
            yield
        finally:
            job.stop()
        for pid, pidfd in pidfds.items():
            assert has_ended(pidfd, within_s=5.0), f"process {pid} is left"
            os.close(pidfd)


def await_ready(job: Launcher, count: int) -> Iterator[Any]:
    """The messages of a job after its first `count`, which say that a rank is ready."""
    messages = job.messages(timeout_s=60.0)
    for _ in range(count):
        assert next(messages).payload == "ready"
    return messages


# A rank raises


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_raises_ends_the_job_and_is_named_first(culprit: int) -> None:
    job = Launcher(raise_on_one, (culprit,), devices=range(3), settings=SETTINGS)
    with nothing_left(job):
        messages = await_ready(job, 3)
        job.tell("raise")
        told = time.monotonic()
        with pytest.raises(RankFailed) as caught:
            list(messages)
        assert time.monotonic() - told < AT_ONCE_S
    lines = str(caught.value).splitlines()
    assert lines[0] == f"rank {culprit} of 3 failed:"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == f"ZeroDivisionError: boom on {culprit}"
    assert "in raise_on_one" in str(caught.value)


@pytest.mark.parametrize("kind", [InputError, ConfigError])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_users_mistake_arrives_as_itself(kind: type[UnevenError], everywhere: bool) -> None:
    with pytest.raises(InputError, match="key 'lr': found -1, expected a positive number") as caught:
        launch(refuse_input, kind, everywhere, num_devices=3, settings=SETTINGS)
    assert type(caught.value) is kind


def test_another_error_of_ours_is_the_cause_of_rank_failed() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 failed") as caught:
        launch(refuse_input, UnevenError, False, num_devices=2, settings=SETTINGS)
    assert type(caught.value.__cause__) is UnevenError


def test_a_result_that_does_not_pickle_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankFailed, match=r"rank \d of 2 failed:\nTraceback(?s:.)*return_a_function"):
        launch(return_a_function, num_devices=2, settings=SETTINGS)


# A rank dies


def test_a_killed_rank_is_named_with_its_signal() -> None:
    job = Launcher(wait_in_a_collective, (2,), devices=range(3), settings=SETTINGS)
    with nothing_left(job):
        messages = await_ready(job, 3)
        os.kill(job.pids[2], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(RankFailed) as caught:
            list(messages)
        assert time.monotonic() - killed < AT_ONCE_S
    lines = str(caught.value).splitlines()
    assert lines == ["rank 2 of 3 failed:", "the process ended by signal SIGKILL without a traceback"]


def test_the_port_of_a_job_is_closed_after_it() -> None:
    before = listening_ports()
    job = Launcher(wait_in_a_collective, (0,), devices=range(2), settings=SETTINGS)
    with nothing_left(job):
        await_ready(job, 2)
        assert len(listening_ports() - before) == 1
    assert listening_ports() - before == set()


def test_a_rank_that_exits_without_a_word_is_named_with_its_code_and_log(tmp_path) -> None:
    settings = LaunchSettings(SETTINGS.transport, num_threads=1, logs=tmp_path)
    with pytest.raises(RankFailed) as caught:
        launch(print_and_exit, num_devices=2, settings=settings)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 2 failed:"
    assert "the process ended by exit code 3 without a traceback" in lines[1]
    assert str(tmp_path / "rank-1.log") in lines[1]
    assert lines[2:] == ["last words"]


def test_a_silent_job_is_an_error_after_the_timeout() -> None:
    job = Launcher(wait_in_a_collective, (1,), devices=range(2), settings=SETTINGS)
    with nothing_left(job):
        await_ready(job, 2)
        with pytest.raises(TimeoutError, match=r"no rank of \[0, 1\] has reported for 0.1 s"):
            next(job.messages(timeout_s=0.1))


def test_an_error_in_the_launchers_own_code_ends_its_ranks() -> None:
    pidfds: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt(pidfds)
    for pidfd in pidfds:
        assert has_ended(pidfd, within_s=5.0)
        os.close(pidfd)


def interrupt(pidfds: list[int]) -> None:
    with Launcher(wait_in_a_collective, (1,), devices=range(2), settings=SETTINGS) as job:
        await_ready(job, 2)
        pidfds += [os.pidfd_open(pid) for pid in job.pids.values()]
        assert not any(has_ended(pidfd, within_s=0.0) for pidfd in pidfds)
        raise KeyboardInterrupt


# The launcher dies

SCRIPT = """
    import sys
    import torch
    from uneven.launch.launcher import Launcher, LaunchSettings


    def program(world, mailbox):
        group = world.everyone(purpose="test")
        group.all_reduce(torch.ones(1))
        mailbox.post("ready")
        if world.device == 0:
            mailbox.wait()
        group.all_reduce(torch.ones(1))


    if __name__ == "__main__":
        with Launcher(program, devices=range(3), settings=LaunchSettings(num_threads=1)) as job:
            messages = job.messages(timeout_s=60.0)
            for _ in range(3):
                next(messages)
            print(*job.pids.values(), flush=True)
            sys.stdin.readline()
"""


@contextmanager
def script(folder: Path) -> Iterator[tuple[subprocess.Popen, dict[int, int]]]:
    """A running script whose ranks are blocked in a collective, and descriptors of all processes it started."""
    path = folder / "job.py"
    path.write_text(textwrap.dedent(SCRIPT))
    temporary = folder / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONWARNINGS": "error"}
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
        cwd=ROOT,
    ) as process:
        ranks = [int(pid) for pid in process.stdout.readline().split()]
        assert len(ranks) == 3
        pidfds = {pid: os.pidfd_open(pid) for pid in processes_of_session(process.pid)}
        assert {*ranks, process.pid} < pidfds.keys()
        try:
            yield process, pidfds
        finally:
            process.kill()
            for pidfd in pidfds.values():
                os.close(pidfd)


def processes_of_session(session: int) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(pid)) == session:
                found.append(int(pid))
        except ProcessLookupError:
            continue
    return found


def assert_ended(pidfds: dict[int, int], *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    for pid, pidfd in pidfds.items():
        assert has_ended(pidfd, within_s=max(0.0, deadline - time.monotonic())), f"process {pid} is left"


def test_ranks_end_when_their_launcher_is_killed(tmp_path) -> None:
    with script(tmp_path) as (process, pidfds):
        process.kill()
        assert_ended(pidfds, within_s=5.0)


def test_a_script_that_ends_leaves_no_process_and_no_file(tmp_path) -> None:
    with script(tmp_path) as (process, pidfds):
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(timeout=30.0) == 0
        assert_ended(pidfds, within_s=5.0)
    # torch makes an empty cache folder for its compiler whenever it is imported.
    left = [path.name for path in (tmp_path / "temporary").iterdir() if not path.name.startswith("torchinductor_")]
    assert left == []


# Results, commands, logs


def test_results_come_in_the_order_of_devices() -> None:
    results = launch(finish_in_reverse, num_devices=4, settings=SETTINGS)
    assert results == [f"result of {device}" for device in range(4)]


def test_commands_reach_the_devices_they_are_for() -> None:
    with Launcher(echo, devices=(3, 5), settings=SETTINGS) as job:
        job.tell("for all")
        job.tell("for three", device=3)
        job.tell("for five", device=5)
        results = {message.device: message.payload for message in job.messages(timeout_s=60.0)}
    assert results == {3: ["for all", "for three"], 5: ["for all", "for five"]}


def test_everything_a_rank_prints_goes_to_its_log(tmp_path, capfd) -> None:
    settings = LaunchSettings(SETTINGS.transport, num_threads=1, logs=tmp_path)
    launch(print_and_return, num_devices=2, settings=settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.log", "rank-1.log"]
    for device in range(2):
        log = (tmp_path / f"rank-{device}.log").read_text()
        lines = [f"hello from {device}", f"native output of {device}", f"trouble on {device}"]
        assert sorted(log.splitlines()) == lines
    assert capfd.readouterr() == ("", "")


def test_a_traceback_goes_to_the_ranks_log_too(tmp_path) -> None:
    settings = LaunchSettings(SETTINGS.transport, num_threads=1, logs=tmp_path)
    with pytest.raises(RankFailed):
        launch(divide_by_zero, num_devices=1, settings=settings)
    assert "ZeroDivisionError: division by zero" in (tmp_path / "rank-0.log").read_text()


def test_an_error_that_does_not_pickle_keeps_its_traceback() -> None:
    with pytest.raises(RankFailed, match=r"UnevenError: the cause"):
        launch(raise_an_error_that_does_not_pickle, num_devices=1, settings=SETTINGS)
