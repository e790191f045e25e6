"""One job under two launchers, each with ranks of its own, as on two hosts; the launchers are threads here."""

import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from uneven.comm import Transport, World
from uneven.errors import ConfigError, InputError, RankFailed
from uneven.launch.inline import InlineRank
from uneven.launch.launcher import Launcher, LaunchSettings
from uneven.launch.meet import Meeting
from uneven.launch.peers import Kind
from uneven.launch.rank import Mailbox
from uneven.launch.site import Place, Site, join

DEVICES = (4, 5, 6)
AT_ONCE_S = 10.0
HERE = socket.gethostname()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def on_two_hosts(body: Callable[[Site], Any], *, kind: Kind = "host") -> list[Any]:
    """What `body` returns or raises under each launcher; devices are dealt to hosts as 2 + 1, one to each rank."""
    port = free_port()
    ours = {"num_devices": 1, "is_rank": True} if kind == "rank" else {}

    def one(index: int) -> Any:
        try:
            with join(Place(Meeting(index, 2, "127.0.0.1", port, kind), **ours), timeout_s=60.0) as site:
                return body(site)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, range(2)))


def job(site: Site, program: Callable[..., Any], *args: Any, logs: Path | None = None) -> Launcher:
    settings = LaunchSettings(Transport(timeout_s=120.0), num_threads=1, logs=logs, site=site)
    return Launcher(program, args, devices=DEVICES, settings=settings)


def sum_of_devices(world: World, mailbox: Mailbox) -> float:
    print("hello")
    return world.everyone(purpose="test").all_reduce(torch.tensor([float(world.device)])).item()


def wait_or_raise(world: World, mailbox: Mailbox, culprit: int, kind: type[Exception]) -> None:
    """All meet; then one raises after its launcher's word, while the others wait for it."""
    group = world.everyone(purpose="test")
    group.all_reduce(torch.ones(1))
    mailbox.post("ready")
    if world.device == culprit:
        mailbox.wait()
        raise kind(f"boom on {culprit}")
    group.all_reduce(torch.ones(1))


def test_each_launcher_starts_its_part_of_the_devices(tmp_path: Path) -> None:
    def body(site: Site) -> Any:
        with job(site, sum_of_devices, logs=tmp_path / str(site.peers.index) / "logs") as running:
            devices = list(running.pids)
            found = {message.device: message.payload for message in running.messages(timeout_s=60.0)}
            site.peers.exchange("done")
        return devices, found

    assert on_two_hosts(body) == [([4, 5], {4: 15.0, 5: 15.0}), ([6], {6: 15.0})]
    logs = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.log"))
    assert logs == ["0/logs/rank-4.log", "0/logs/rank-5.log", "1/logs/rank-6.log"]


def fail(culprit: int, end: Callable[[Launcher], None], kind: type[Exception] = ZeroDivisionError) -> list[Any]:
    """The errors of both launchers of a job after `end` was called where the culprit runs, and how long that took."""

    def body(site: Site) -> None:
        with job(site, wait_or_raise, culprit, kind) as running:
            messages = running.messages(timeout_s=60.0)
            for _ in running.pids:
                assert next(messages).payload == "ready"
            site.peers.exchange("all are ready")
            if culprit in running.pids:
                end(running)
            began = time.monotonic()
            try:
                list(messages)
            finally:
                assert time.monotonic() - began < AT_ONCE_S

    return on_two_hosts(body)


@pytest.mark.parametrize(("culprit", "rank", "host"), [(6, 2, 1), (5, 1, 0)])
def test_a_killed_rank_ends_the_job_on_both_hosts_by_name(culprit: int, rank: int, host: int) -> None:
    errors = fail(culprit, lambda running: os.kill(running.pids[culprit], signal.SIGKILL))
    assert [type(error) for error in errors] == [RankFailed] * 2
    text = "the process ended by signal SIGKILL without a traceback"
    assert {str(error) for error in errors} == {
        f"rank {rank} of 3 (device {culprit}) on host {host} ({HERE}) failed:\n{text}"
    }


@pytest.mark.parametrize("culprit", [4, 6])
def test_a_rank_that_raises_is_the_cause_on_both_hosts(culprit: int) -> None:
    errors = fail(culprit, lambda running: running.tell("raise", device=culprit))
    assert [type(error) for error in errors] == [RankFailed] * 2
    assert len({str(error) for error in errors}) == 1
    lines = str(errors[0]).splitlines()
    assert lines[0] == f"rank {culprit - 4} of 3 (device {culprit}) on host {int(culprit == 6)} ({HERE}) failed:"
    assert lines[-1] == f"ZeroDivisionError: boom on {culprit}"


def test_a_ranks_input_error_is_one_on_both_hosts() -> None:
    errors = fail(6, lambda running: running.tell("raise", device=6), ConfigError)
    assert [type(error) for error in errors] == [InputError] * 2
    assert {str(error) for error in errors} == {f"host 1 ({HERE}): boom on 6"}


def test_a_launcher_that_fails_ends_the_job_on_the_other_host() -> None:
    def body(site: Site) -> None:
        with job(site, wait_or_raise, 4, ZeroDivisionError) as running:
            messages = running.messages(timeout_s=60.0)
            for _ in running.pids:
                next(messages)
            if site.peers.index == 1:
                raise OSError("disk full")
            list(messages)

    first, second = on_two_hosts(body)
    assert type(second) is OSError
    assert (type(first), str(first)) == (RankFailed, f"host 1 ({HERE}): OSError: disk full")


# Ranks that are threads of the processes that torchrun or Slurm started


def inline(site: Site, program: Callable[..., Any], *args: Any) -> InlineRank:
    settings = LaunchSettings(Transport(timeout_s=120.0), num_threads=1, site=site)
    return InlineRank(program, args, devices=DEVICES[:2], settings=settings)


def test_a_rank_that_is_a_thread_posts_and_returns() -> None:
    def body(site: Site) -> Any:
        with inline(site, sum_of_devices) as running:
            found = [(message.device, message.kind, message.payload) for message in running.messages()]
            site.peers.exchange("done")
        return found

    assert on_two_hosts(body, kind="rank") == [[(4, "result", 9.0)], [(5, "result", 9.0)]]


@pytest.mark.parametrize("culprit", [4, 5])
def test_a_thread_that_raises_is_the_cause_for_all(culprit: int) -> None:
    def body(site: Site) -> None:
        with inline(site, wait_or_raise, culprit, ZeroDivisionError) as running:
            messages = running.messages()
            assert next(messages).payload == "ready"
            site.peers.exchange("all are ready")
            running.tell("raise")
            list(messages)

    errors = on_two_hosts(body, kind="rank")
    assert [type(error) for error in errors] == [RankFailed] * 2
    assert len({str(error) for error in errors}) == 1
    lines = str(errors[0]).splitlines()
    assert lines[0] == f"rank {culprit - 4} of 2 (device {culprit}) on {HERE} failed:"
    assert lines[-1] == f"ZeroDivisionError: boom on {culprit}"
