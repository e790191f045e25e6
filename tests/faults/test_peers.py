"""Launchers that meet, agree, fail and vanish: over real sockets, in threads of one process or in several."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from typing import Any

import pytest

from uneven.errors import ConfigError, DataError, HostLost, InputError, Interrupted, RankFailed, UnevenError
from uneven.launch.failure import Failure
from uneven.launch.meet import ANSWER_S, LINE_S, Meeting, meet
from uneven.launch.peers import REPORTS_S, Peers

TIMEOUT_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def together(count: int, body: Callable[[Peers], Any], **changes: Any) -> list[Any]:
    """What `body` returns or raises on each of `count` launchers that meet."""
    port = changes.pop("port", None) or free_port()

    def one(index: int) -> Any:
        try:
            with meet(Meeting(index, count, "127.0.0.1", port, **changes), timeout_s=TIMEOUT_S).peers as peers:
                return body(peers)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(one, range(count)))


def call(port: int) -> socket.socket:
    """A connection to who is about to listen."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def kinds(found: list[Any]) -> list[type]:
    return [type(each) for each in found]


def texts(found: list[Any]) -> set[str]:
    return {str(each) for each in found}


# Exchange


def test_all_get_what_each_says() -> None:
    def body(peers: Peers) -> Any:
        first = peers.exchange({"index": peers.index})
        return first, peers.exchange(peers.index**2)

    expected = ([{"index": 0}, {"index": 1}, {"index": 2}], [0, 1, 4])
    assert together(3, body) == [expected] * 3


def test_one_alone_hears_itself() -> None:
    assert together(1, lambda peers: peers.exchange((1, 2))) == [[[1, 2]]]


# A port


def test_a_taken_port_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert together(2, lambda peers: peers.exchange(peers.index), port=taken.getsockname()[1]) == [[0, 1]] * 2


def test_a_stranger_that_talks_is_passed_over() -> None:
    def greet(listener: socket.socket) -> None:
        caller, _ = listener.accept()
        caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        listener.accept()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        threading.Thread(target=greet, args=(taken,), daemon=True).start()
        assert together(2, lambda peers: peers.exchange(peers.index), port=taken.getsockname()[1]) == [[0, 1]] * 2


def test_a_stranger_that_calls_is_sent_away() -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(meet, Meeting(0, 2, "127.0.0.1", port), timeout_s=TIMEOUT_S)
        for word in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x09half"):
            with call(port) as stranger:
                stranger.sendall(word)
        second = threads.submit(meet, Meeting(1, 2, "127.0.0.1", port), timeout_s=TIMEOUT_S)
        with first.result().peers, second.result().peers:
            pass


def test_two_jobs_at_one_place_are_told_apart_by_their_names() -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        jobs = [
            threads.submit(together, 2, lambda peers, job=job: peers.exchange(job), port=port, job_id=job)
            for job in ("a", "b")
        ]
        assert [job.result() for job in jobs] == [[["a", "a"]] * 2, [["b", "b"]] * 2]


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host 0 is to be called at 192\.0\.2\.77, which is no address of this host"):
        meet(Meeting(0, 2, "192.0.2.77", 29400), timeout_s=1.0)


# Who does not come


def test_who_does_not_come_is_named() -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(meet, Meeting(i, 3, "127.0.0.1", port), timeout_s=1.0) for i in (0, 2)]
        for each in waiting:
            with pytest.raises(HostLost, match=f"host 1 did not call 127.0.0.1, port {port} to {port + 7} within 1 s"):
                each.result()


def test_a_first_one_that_is_not_there_is_named() -> None:
    port = free_port()
    with pytest.raises(HostLost, match=f"host 0 was not found at 127.0.0.1, port {port} to {port + 7} within 0 s: "):
        meet(Meeting(1, 2, "127.0.0.1", port), timeout_s=0.0)


def test_hosts_that_count_otherwise_are_refused() -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(meet, Meeting(i, 2 + i, "127.0.0.1", port), timeout_s=TIMEOUT_S) for i in (0, 1)]
        for each in both:
            with pytest.raises(ConfigError, match=r"host 0 is one of 2, but host 1 \(.+\) one of 3"):
                each.result()


def test_a_place_that_is_taken_is_refused() -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        three = [threads.submit(meet, Meeting(i, 3, "127.0.0.1", port), timeout_s=2.0) for i in (0, 1, 1)]
        errors = [each.exception() for each in three]
    assert kinds(errors) == [HostLost] * 3
    assert any("another host 1 is there already" in text for text in texts(errors))


def test_one_that_left_before_all_had_come_may_come_again() -> None:
    port = free_port()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(meet, Meeting(0, 3, "127.0.0.1", port), timeout_s=TIMEOUT_S)
        with Connection(call(port).detach()) as line:
            hello = {"job": "", "kind": "host", "count": 3, "index": 2, "name": "early"}
            line.send_bytes(json.dumps(hello).encode())
            assert json.loads(line.recv_bytes()) == {"joined": True}
        later = [threads.submit(meet, Meeting(i, 3, "127.0.0.1", port), timeout_s=TIMEOUT_S) for i in (2, 1)]
        for each in (first, *later):
            with each.result().peers as peers:
                assert "early" not in peers.names


# Failures


def test_an_input_error_of_one_is_one_of_all() -> None:
    def body(peers: Peers) -> None:
        if peers.index == 2:
            raise DataError("no corpus at x.txt")
        peers.exchange("ready")

    found = together(3, body)
    assert kinds(found) == [InputError, InputError, DataError]
    name = socket.gethostname()
    assert texts(found[:2]) == {f"host 2 ({name}): no corpus at x.txt"}


@pytest.mark.parametrize("culprit", [0, 1])
def test_ctrl_c_on_one_ends_all(culprit: int) -> None:
    def body(peers: Peers) -> None:
        if peers.index == culprit:
            raise KeyboardInterrupt
        peers.exchange("ready")

    found = together(3, body)
    assert type(found.pop(culprit)) is KeyboardInterrupt
    assert kinds(found) == [Interrupted] * 2
    assert texts(found) == {f"host {culprit} ({socket.gethostname()}): the user ended it"}


def settle(peers: Peers, failures: list[Failure]) -> UnevenError:
    """As a launcher does: those without a failure first hear of one."""
    if not failures:
        try:
            peers.exchange("done")
        except UnevenError as error:
            return error
    return peers.settle(failures)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_earliest_failure_is_the_cause_everywhere(first: int) -> None:
    def body(peers: Peers) -> UnevenError:
        age = 5.0 if peers.index == first else 1.0
        return settle(peers, [Failure(time.time() - age, f"rank {peers.index} failed:\nboom")])

    found = together(3, body)
    assert kinds(found) == [RankFailed] * 3
    assert texts(found) == {f"rank {first} failed:\nboom"}


def test_an_end_without_a_word_is_the_cause_of_all_others() -> None:
    def body(peers: Peers) -> UnevenError:
        return settle(
            peers, [Failure(0.0, "killed") if peers.index == 1 else Failure(time.time(), "connection closed")]
        )

    assert texts(together(3, body)) == {"killed"}


def test_those_who_saw_nothing_hear_it_too() -> None:
    def body(peers: Peers) -> UnevenError:
        return settle(peers, [Failure(time.time(), "boom")] if peers.index == 1 else [])

    assert texts(together(3, body)) == {"boom"}


# A launcher that vanishes

LAUNCHER = """
import sys
from uneven.launch.meet import Meeting, meet
peers = meet(Meeting(int(sys.argv[1]), 2, "127.0.0.1", int(sys.argv[2])), timeout_s=30.0).peers
print("met", flush=True)
sys.stdin.read()
"""


@contextmanager
def launcher(index: int, port: int) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", LAUNCHER, str(index), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_launcher_is_noticed_at_once_and_named(victim: int) -> None:
    port = free_port()
    with (
        launcher(victim, port) as process,
        meet(Meeting(1 - victim, 2, "127.0.0.1", port), timeout_s=TIMEOUT_S).peers as peers,
    ):
        assert process.stdout.readline() == "met\n"
        os.kill(process.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(HostLost, match=rf"host {victim} \(.+\) is gone"):
            peers.exchange("ready")
        assert time.monotonic() - killed < 5.0


def test_a_stopped_launcher_does_not_hold_up_the_verdict() -> None:
    port = free_port()
    with (
        launcher(1, port) as process,
        meet(Meeting(0, 2, "127.0.0.1", port), timeout_s=TIMEOUT_S).peers as peers,
    ):
        assert process.stdout.readline() == "met\n"
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert str(peers.settle([Failure(time.time(), "boom")])) == "boom"
        assert time.monotonic() - began < REPORTS_S + ANSWER_S


# A job that outlives its hosts


def test_what_is_said_arrives_in_order() -> None:
    def body(peers: Peers) -> Any:
        for number in range(3):
            for other in peers.others:
                peers.say(other, [peers.index, number])
        said: list[Any] = []
        while len(said) < 3 * len(peers.others):
            assert not peers.hear(mp_connection.wait(peers.lines, TIMEOUT_S))
            said += peers.said()
        peers.exchange("done")
        return sorted(said, key=lambda each: each[0])

    first, *others = together(3, body)
    assert first == [(peer, [peer, number]) for peer in (1, 2) for number in range(3)]
    assert others == [[(0, [0, number]) for number in range(3)]] * 2


def test_a_launcher_that_is_fenced_learns_that_the_job_goes_on() -> None:
    """Though what it says is still on its way."""

    def body(peers: Peers) -> Any:
        if peers.index == 1:
            while not peers.hear(mp_connection.wait(peers.lines, 0)):
                peers.say(0, "x" * 1000)
            raise peers.settle([])
        if peers.index == 0:
            peers.outlive_hosts()
            peers.fence(1, "silent")
            peers.say(2, "go on")
            assert peers.hear(mp_connection.wait(peers.lines)) is False  # host 2 has ended
            return peers.others, sorted(peers.gone)
        peers.hear(mp_connection.wait(peers.lines))
        return peers.said()

    first, fenced, third = together(3, body)
    assert (first, third) == (([], [1, 2]), [(0, "go on")])
    assert type(fenced) is HostLost
    assert str(fenced) == f"the job went on without host 1 ({socket.gethostname()}): silent"


def test_one_that_reads_nothing_holds_nobody_up() -> None:
    port = free_port()
    with (
        launcher(1, port) as process,
        meet(Meeting(0, 2, "127.0.0.1", port), timeout_s=TIMEOUT_S).peers as peers,
    ):
        assert process.stdout.readline() == "met\n"
        peers.outlive_hosts()
        began = time.monotonic()
        peers.say(1, "x" * 50_000_000)
        peers.hear(mp_connection.wait(peers.lines, TIMEOUT_S))
        assert list(peers.gone) == [1]
        assert time.monotonic() - began < 4 * LINE_S + ANSWER_S
