"""One job under two launchers, each with ranks of its own, as on two hosts; the launchers are threads here."""

import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.test_layout_plan import STRUCTURE
from uneven.comm import Transport, World
from uneven.elastic.agent import PATIENCE_S, Agent
from uneven.elastic.fleet import Fleet
from uneven.errors import ConfigError, HostLost, InputError, RankFailed
from uneven.launch.inline import InlineRank
from uneven.launch.launcher import Launcher, LaunchSettings
from uneven.launch.meet import Meeting
from uneven.launch.peers import Kind
from uneven.launch.rank import Mailbox
from uneven.launch.site import Place, Site, join
from uneven.layout import ParallelPlan

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


# Ranks of all launchers as those of one, which decides


def echo(world: World, mailbox: Mailbox) -> None:
    """Say all that is heard until the word is over."""
    while (word := mailbox.wait()) != "over":
        mailbox.post(word)


def elastic(site: Site) -> dict[str, Any]:
    plan = ParallelPlan.from_shares(STRUCTURE, [[1, 1], [1]])
    settings = LaunchSettings(Transport(timeout_s=120.0), num_threads=1, site=site)
    return {"home": plan, "settings": settings}


def lead(fleet: Fleet, wanted: dict[int, str], *, kind: str = "post") -> dict[int, Any]:
    """What devices say, until each of these has said what is wanted."""
    deadline = time.monotonic() + 60.0
    found: dict[int, Any] = {}
    while found.keys() != wanted.keys():
        assert time.monotonic() < deadline, found
        found |= {message.device: message.payload for message in fleet.poll(0.1) if message.kind == kind}
    return found


def test_the_first_launcher_has_the_ranks_of_all() -> None:
    """They are told, killed and started again, wherever they are; and each launcher may ask for all of them."""

    def body(site: Site) -> Any:
        if site.peers.index:
            with Agent(echo, **elastic(site)) as agent:
                agent.tell("from host 1")
                agent.serve()
            return "ended"
        with Fleet(echo, **elastic(site)) as fleet:
            assert fleet.running == [0, 1, 2]
            fleet.tell("all")
            assert lead(fleet, dict.fromkeys([0, 1, 2], "all")) == dict.fromkeys([0, 1, 2], "all")
            assert (sorted(fleet.pids), fleet.asked()) == ([0, 1, 2], ["from host 1"])
            before = fleet.pids
            for device in (1, 2):
                fleet.kill(device)
            ends = lead(fleet, dict.fromkeys([1, 2], ""), kind="end")
            assert all("the process ended by signal SIGKILL" in end.text for end in ends.values())
            assert fleet.running == [0]
            fleet.start(2)
            fleet.tell("some", devices=[2])
            assert lead(fleet, {2: "some"}) == {2: "some"}
            assert fleet.pids[2] != before[2]
            assert list(fleet.lost(60.0)) == []
            fleet.tell("over")
            assert lead(fleet, dict.fromkeys([0, 2], ""), kind="result") == {0: None, 2: None}
            assert fleet.running == []
        return "over"

    assert on_two_hosts(body) == ["over", "ended"]


def test_a_host_that_does_not_end_a_rank_as_told_is_lost() -> None:
    def body(site: Site) -> Any:
        if site.peers.index:
            # Such a one says that it lives, and does nothing else.
            with Launcher(echo, devices=(0, 1, 2), settings=elastic(site)["settings"]) as running:
                while not site.peers.hear(mp_connection.wait(site.peers.lines, 0.1)):
                    site.peers.say(0, {})
                raise running.fail({})
        with Fleet(echo, **elastic(site)) as fleet:
            fleet.kill(2)
            began = time.monotonic()
            while not (found := list(fleet.lost(1.0))):
                fleet.poll(0.1)
            assert 1.0 < time.monotonic() - began < AT_ONCE_S
            assert not fleet.is_reachable(2)
        return found

    (loss,), error = on_two_hosts(body)
    name = f"host 1 ({HERE})"
    assert (loss.host, loss.devices, loss.why) == (name, (2,), f"{name} did not end devices [2] within 1.0 s")
    assert type(error) is HostLost
    assert str(error) == f"the job went on without {name}: {loss.why}"


def test_a_host_that_says_nothing_is_lost_and_fenced() -> None:
    """It lives, and so does its rank, as when it hangs or its network is cut."""

    def body(site: Site) -> Any:
        if site.peers.index:
            with Launcher(echo, devices=(0, 1, 2), settings=elastic(site)["settings"]) as running:
                site.peers.say(0, {})
                while not site.peers.hear(mp_connection.wait(site.peers.lines)):
                    pass
                raise running.fail({})
        with Fleet(echo, **elastic(site)) as fleet:
            while not (found := list(fleet.lost(1.5))):
                fleet.poll(0.1)
                is_quiet = fleet.is_quiet(2)
            assert is_quiet
            assert fleet.running == [0, 1]
        return found

    (loss,), error = on_two_hosts(body)
    assert (loss.host, loss.devices) == (f"host 1 ({HERE})", (2,))
    assert 1.5 < loss.silent_s < AT_ONCE_S
    assert loss.why.startswith(f"host 1 ({HERE}) said nothing for ")
    assert type(error) is HostLost
    assert str(error) == f"the job went on without host 1 ({HERE}): {loss.why}"


def test_a_launcher_that_hears_nothing_of_the_first_ends_its_ranks() -> None:
    def body(site: Site) -> Any:
        if site.peers.index:
            began = time.monotonic()
            with Agent(echo, **elastic(site)) as agent:
                try:
                    agent.serve()
                finally:
                    assert PATIENCE_S < time.monotonic() - began < PATIENCE_S + AT_ONCE_S
        with Launcher(echo, devices=(0, 1, 2), settings=elastic(site)["settings"]):
            site.peers.outlive_hosts()
            site.peers.say(1, {"limit_s": 0.5})
            while site.peers.others:
                site.peers.hear(mp_connection.wait(site.peers.lines))

    _, error = on_two_hosts(body)
    assert type(error) is HostLost
    assert str(error).startswith(f"host 0 ({HERE}) said nothing for 10.")


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_raises_ends_an_elastic_job_everywhere(culprit: int) -> None:
    def body(site: Site) -> Any:
        if site.peers.index:
            with Agent(raise_when_told, **elastic(site)) as agent:
                return agent.serve()
        with Fleet(raise_when_told, **elastic(site)) as fleet:
            fleet.tell("raise", devices=[culprit])
            while True:
                for message in fleet.poll(0.1):
                    if message.kind == "error":
                        raise fleet.fail({message.device: message.payload})

    errors = on_two_hosts(body)
    assert [type(error) for error in errors] == [RankFailed] * 2
    assert len({str(error) for error in errors}) == 1
    assert f"on host {culprit // 2} ({HERE}) failed:" in str(errors[0])
    assert str(errors[0]).endswith("ZeroDivisionError: boom")


def raise_when_told(world: World, mailbox: Mailbox) -> None:
    mailbox.wait()
    raise ZeroDivisionError("boom")


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
