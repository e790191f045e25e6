"""A world that goes on without some of its devices: connections given up, waits interrupted, nothing left behind."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tests.ranks.pool import RankPool
from uneven.comm import Group, Transport, World, connect_store, serve_store
from uneven.errors import LayoutError, PeerLost

HOST = "127.0.0.1"
SOON_S = 2.0
"""Far above what a loaded machine needs for a slice of a wait, far below the transport's timeout."""
Case = Callable[[World, World], Any]


def on_a_store_of_its_own(world: World, case: Case, timeout_s: float = 60.0) -> Any:
    """Run a case with a world that may be interrupted, and with the pool's, which may not."""
    store = serve_store(HOST, timeout_s=60.0) if world.device == 0 else None
    everyone = world.everyone(purpose="outside")
    port = int(everyone.all_reduce(torch.tensor([store.port if store else 0])))
    meet = partial(connect_store, HOST, port, timeout_s=60.0)
    found = case(World(world.device, world.devices, store=meet, transport=Transport(timeout_s=timeout_s)), world)
    everyone.all_reduce(torch.zeros(1))
    return found


def wait_for_all(outside: World) -> None:
    outside.everyone(purpose="outside").all_reduce(torch.zeros(1))


def total(group: Group) -> float:
    """The sum of the devices, by the group."""
    return float(group.all_reduce(torch.tensor([float(group.devices[group.rank])])))


@contextmanager
def interrupted_when_waiting(world: World) -> Iterator[None]:
    """Another thread interrupts the first wait of the block."""

    def begin(is_waiting: bool) -> None:
        if is_waiting:
            threading.Thread(target=world.interrupt).start()

    world.pulse.on_wait = begin
    try:
        yield
    finally:
        world.pulse.on_wait = None


def refusal(action: Callable[[], Any], *, kind: type[Exception] = PeerLost) -> tuple[str, bool]:
    """What an action raises, and whether soon."""
    began = time.monotonic()
    try:
        action()
    except kind as error:
        return str(error), time.monotonic() - began < SOON_S
    return "nothing", False


# Going on


def lose_and_get_back(world: World, outside: World) -> list[Any]:
    """Device 3 goes and comes back; the groups of the others stay."""
    first = world.everyone(purpose="all")
    pair = world.group((0, 1), purpose="tp") if world.device < 2 else None
    found = [total(first), total(pair) if pair else 1.0]
    if world.device < 3:
        world.enter(1, (0, 1, 2))
        found.append(refusal(partial(total, first))[0])
        second = world.everyone(purpose="all")
        found += [world.devices, second is first, total(second)]
        if pair is not None:
            found += [world.group((0, 1), purpose="tp") is pair, total(pair)]
        world.narrow((0, 1))
        found.append(refusal(partial(total, second))[0])
        if pair is not None:
            found += [total(pair), refusal(partial(world.group, (0, 2), purpose="all"), kind=LayoutError)[0]]
    wait_for_all(outside)
    world.enter(2, (0, 1, 2, 3))
    found.append(total(world.everyone(purpose="all")))
    if pair is not None:
        found += [world.group((0, 1), purpose="tp") is pair, total(pair)]
    return found


def test_groups_outlive_a_member_of_others(pool: RankPool) -> None:
    found = pool.run(on_a_store_of_its_own, lose_and_get_back, num_ranks=4)
    gone = "the group all of {} is not connected any more"
    both = [gone.format("[0, 1, 2, 3]"), (0, 1, 2), False, 3.0]
    stranger = "device {} of the devices [0, 1] can't join a group of [0, 2]: [2] are not in this job"
    for device in (0, 1):
        after = [True, 1.0, gone.format("[0, 1, 2]"), 1.0, stranger.format(device), 6.0, True, 1.0]
        assert found[device] == [6.0, 1.0, *both, *after]
    assert found[2] == [6.0, 1.0, *both, gone.format("[0, 1, 2]"), 6.0]
    assert found[3] == [6.0, 1.0, 6.0]


def test_a_world_without_interruptions_meets_again_on_one_client(pool: RankPool) -> None:
    assert pool.run(enter_often, num_ranks=3) == [[3.0] * 5] * 3


def enter_often(world: World) -> list[float]:
    found = []
    for generation in range(5):
        world.enter(generation, world.devices)
        found.append(total(world.everyone(purpose="all")))
    return found


# Interruptions


def wait_for_nobody(world: World, outside: World) -> list[Any]:
    """Device 0 waits in vain, first in an operation, then for connections."""
    group = world.everyone(purpose="all")
    found: list[Any] = [total(group)]
    if world.device == 0:
        with interrupted_when_waiting(world):
            found.append(refusal(partial(total, group)))
        found.append(refusal(partial(total, group)))
        found.append(refusal(partial(group.all_to_all, torch.zeros(1), send=[0, 1], receive=[0, 0])))
        world.pulse.resume()
    wait_for_all(outside)
    world.enter(1, world.devices)
    if world.device == 0:
        with interrupted_when_waiting(world):
            found.append(refusal(partial(world.everyone, purpose="all")))
        found.append(refusal(partial(world.everyone, purpose="all")))
        world.pulse.resume()
    wait_for_all(outside)
    world.enter(2, world.devices)
    found += [world.everyone(purpose="all") is group, total(group), world.pulse.waiting]
    return found


def test_a_wait_is_interrupted_though_the_others_do_nothing(pool: RankPool) -> None:
    found = pool.run(on_a_store_of_its_own, wait_for_nobody, num_ranks=2)
    before = ("device 0 was interrupted before an operation for all", True)
    assert found[0] == [
        1.0,
        ("interrupted while waiting for all of [0, 1]", True),
        before,
        before,
        ("interrupted while [0, 1] connected for all", True),
        ("interrupted while [0, 1] connected for all", True),
        *(True, 1.0, ""),
    ]
    assert found[1] == [1.0, True, 1.0, ""]


# What is left


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def live_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def go_on_for_long(world: World, outside: World) -> list[tuple[int, int]]:
    """Descriptors and threads after generations, each of which ends with an operation that one of them leaves out."""
    found = []
    for generation in range(35):
        world.enter(generation, world.devices)
        group = world.everyone(purpose="all")
        ring = [world.group(pair, purpose="tp") for pair in ((0, 1), (1, 2), (0, 2)) if world.device in pair]
        assert total(group) == 3.0
        assert all(total(pair) == sum(pair.devices) for pair in ring)
        if world.device != generation % 3:
            with interrupted_when_waiting(world):
                message, is_soon = refusal(partial(total, group))
            assert (message, is_soon) == ("interrupted while waiting for all of [0, 1, 2]", True)
            world.pulse.resume()
        wait_for_all(outside)
        found.append((open_files(), live_threads()))
    return found


def test_generations_leave_nothing_behind(pool: RankPool, record_property) -> None:
    for found in pool.run(on_a_store_of_its_own, go_on_for_long, num_ranks=3):
        record_property("descriptors_and_threads", found)
        # Less than one of each a generation: how soon the last one's connections are at rest is left to chance.
        early, late = found[2:5], found[-3:]
        assert max(files for files, _ in late) < max(files for files, _ in early) + 30
        assert max(threads for _, threads in late) < max(threads for _, threads in early) + 30


def leave_connecting(world: World, outside: World) -> list[tuple[int, int]]:
    """Each generation ends while a group connects that one member never comes to."""
    found = []
    for generation in range(6):
        world.enter(generation, world.devices)
        assert total(world.everyone(purpose="all")) == 1.0
        if world.device == 0 and generation:
            with interrupted_when_waiting(world):
                message, is_soon = refusal(partial(world.everyone, purpose="late"))
            assert (message, is_soon) == ("interrupted while [0, 1] connected for late", True)
            world.pulse.resume()
        wait_for_all(outside)
        found.append((open_files(), live_threads()))
    for thread in threading.enumerate():
        if thread.name.startswith("connect "):
            thread.join(timeout=30.0)
    return [*found, (open_files(), live_threads())]


def test_connections_that_were_never_made_are_given_up_with_the_timeout(pool: RankPool, record_property) -> None:
    # Nothing ends the constructor of a group sooner: its thread is left behind for as long.
    for device, found in enumerate(pool.run(on_a_store_of_its_own, leave_connecting, 3.0, num_ranks=2)):
        record_property("descriptors_and_threads", found)
        first, *_, last, after = found
        assert (last[1] >= first[1] + 5) == (device == 0)
        # Less than one of each connection: how soon the threads of gloo itself end is left to chance.
        assert after[0] < first[0] + 5
        assert after[1] < first[1] + 5
