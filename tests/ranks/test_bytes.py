"""Bytes sent for gradients are those of an ordinary data-parallel all-reduce, whatever the layouts, on every rank."""

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import prod
from typing import Any

import pytest
import torch

from tests import models, oracle
from tests.ranks import parity
from tests.ranks.pool import RankPool
from uneven.comm import World
from uneven.layout import ModelLayout, ParallelPlan, Partition, ReplicaPlan, Shard, apportion, segments_of
from uneven.optim import ShardedOptimizer
from uneven.sync import PURPOSE, GradReducer

FP32_BYTES = 4
WHOLE_HEADS = "llama-bias-tied-pad"
"""4 query and 4 key-value heads, so no division shares a key-value head."""
TCP_INFO_BYTES_ACKED = 120
"""Where `struct tcp_info` of linux/tcp.h has the payload bytes that the peer has acknowledged."""


def plan_of(name: str, degrees: tuple[int, ...]) -> ParallelPlan:
    return ParallelPlan.from_shares(models.model_spec(name).structure, [[1.0] * degree for degree in degrees])


def survivors_plan(name: str, *, dead: int) -> ParallelPlan:
    """Two replicas of four, of which a device died: the others of its replica keep theirs and take over its units."""
    structure = models.model_spec(name).structure
    before = plan_of(name, (4, 4)).replicas
    layout = before[1].layout
    survivors = [device for device in layout.devices if device != dead]
    partitions = {}
    for module, partition in layout.partitions.items():
        counts = apportion(partition.count(dead), [1.0] * len(survivors))
        heirs = iter([device for device, count in zip(survivors, counts, strict=True) for _ in range(count)])
        owners = tuple(next(heirs) if owner == dead else owner for owner in partition.owners)
        partitions[module] = Partition(owners)
    return ParallelPlan((before[0], ReplicaPlan(ModelLayout(structure, tuple(survivors), partitions), 3)))


def one_step(world: World, name: str, plan: ParallelPlan) -> dict[str, Any] | None:
    """What one whole training step in fp32 sends, by purpose, and the shapes of the parameters that a rank holds."""
    if world.device not in plan.devices:
        return None
    world = world.scoped("bytes", plan.devices)
    spec = models.model_spec(name)
    model = parity.divided_model(spec, plan, world=world, dtype=torch.float32)
    reducer = GradReducer(model, plan, world=world)
    rows = models.token_batch(spec, parity.BATCH)
    reducer.begin()
    loss = oracle.call(model, parity.own_rows(plan, rows, device=world.device), num_tokens=rows[:, 1:].size)
    loss.backward()
    grads = reducer.finish()
    grads.clip(0.1, norm=grads.norm())
    ShardedOptimizer(model, plan, world=world).step(grads.tiles, lr=0.01)
    parity.global_loss(world, plan, loss)
    traffic = world.traffic
    sent = {purpose: traffic.sent_bytes(purpose) for purpose in traffic.purposes()}
    assert reducer.sent_bytes == float(sent[PURPOSE])
    before = written_bytes()
    reducer.begin(0)
    reducer.finish()
    return {
        "sent": sent,
        "calls": {PURPOSE: traffic.calls(PURPOSE) // 2},
        "wire": written_since(before),
        "shapes": {key: tuple(parameter.shape) for key, parameter in model.named_parameters()},
    }


def tcp_sockets() -> Iterator[tuple[str, socket.socket]]:
    """This process's TCP connections, not what listens for them, each under a name that stays its own."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as each:
                is_tcp = each.type == socket.SOCK_STREAM and each.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield name, each
        except OSError:
            continue  # closed since it was listed


def written_bytes() -> dict[str, int]:
    """What has been written to each of this process's TCP connections, as the kernel counts it."""
    return {name: _written(each) for name, each in tcp_sockets()}


def _written(each: socket.socket) -> int:
    """Bytes that the peer has acknowledged, and those that wait for it to."""
    acknowledged, count = -1, _acknowledged(each)
    while acknowledged != count:
        acknowledged = count
        (waiting,) = struct.unpack("i", fcntl.ioctl(each, termios.TIOCOUTQ, bytes(4)))
        count = _acknowledged(each)
    return count + waiting


def _acknowledged(each: socket.socket) -> int:
    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (count,) = struct.unpack_from("Q", info, TCP_INFO_BYTES_ACKED)
    return count


def written_since(before: dict[str, int]) -> int:
    after = written_bytes()
    return sum(after[name] - before[name] for name in before.keys() & after.keys())


def ring_bytes(elements: int, group_size: int) -> Fraction:
    return Fraction(2 * (group_size - 1) * elements * FP32_BYTES, group_size)


def data_parallel_bytes(plan: ParallelPlan, shapes: dict[str, tuple[int, ...]]) -> Fraction:
    """What a rank sends that all-reduces what it holds: sharded parameters over replicas, others over the world."""
    total = Fraction(0)
    for spec in plan.structure.parameters:
        is_sharded = isinstance(spec.placement, Shard)
        group_size = len(plan.replicas) if is_sharded else len(plan.devices)
        total += ring_bytes(prod(shapes[spec.name]), group_size)
    return total


def shared_head_bytes(plan: ParallelPlan, device: int) -> Fraction:
    """What a rank sends beyond that, because key-value heads that it holds have several holders in a replica."""
    total = Fraction(0)
    for spec in plan.structure.parameters:
        if not isinstance(spec.placement, Shard) or ("k_proj" not in spec.name and "v_proj" not in spec.name):
            continue
        (band,) = spec.placement.bands
        owners = [replica.layout.partitions[spec.placement.module].owners for replica in plan.replicas]
        elements = band.block * prod(spec.shape[1:])
        for first in range(0, len(owners[0]), band.group):
            holders = {owner for replica in owners for owner in replica[first : first + band.group]}
            if device in holders:
                total += ring_bytes(elements, len(holders)) - ring_bytes(elements, len(plan.replicas))
    return total


PLANS: dict[str, Callable[[str], ParallelPlan]] = {
    "4+4": lambda name: plan_of(name, (4, 4)),
    "4+3": lambda name: plan_of(name, (4, 3)),
    "4+2": lambda name: plan_of(name, (4, 2)),
    "4+3+2": lambda name: plan_of(name, (4, 3, 2)),
    "4+3 survivors": lambda name: survivors_plan(name, dead=6),
}


@pytest.fixture(scope="module")
def steps(pool: RankPool) -> Callable[[str, str], tuple[ParallelPlan, list[Any]]]:
    """The results of `one_step` for a model and a plan, each run once."""
    done: dict[tuple[str, str], tuple[ParallelPlan, list[Any]]] = {}

    def run(name: str, world: str) -> tuple[ParallelPlan, list[Any]]:
        if (name, world) not in done:
            plan = PLANS[world](name)
            done[name, world] = plan, pool.run(one_step, name, plan, num_ranks=max(plan.devices) + 1)
        return done[name, world]

    return run


@pytest.mark.parametrize("world", PLANS)
def test_gradients_cost_what_data_parallelism_costs(steps, world: str) -> None:
    plan, results = steps(WHOLE_HEADS, world)
    for device in plan.devices:
        sent = results[device]["sent"]
        assert sent[PURPOSE] == data_parallel_bytes(plan, results[device]["shapes"])
        assert sent[PURPOSE] > 0
        assert shared_head_bytes(plan, device) == 0


@pytest.mark.parametrize("world", PLANS)
def test_no_rank_idles_and_nothing_else_is_sent(steps, world: str) -> None:
    """Each rank sends in proportion to what it holds, and no purpose but those of an ordinary step sends anything.

    Parameters are gathered where there are more replicas than copies of the optimizer's state.
    """
    plan, results = steps(WHOLE_HEADS, world)
    replicas = len(plan.replicas)
    for device in plan.devices:
        sent, shapes = results[device]["sent"], results[device]["shapes"]
        assert sent.keys() == {"grad", "loss", "norm", "tp"} | ({"params"} if replicas > 2 else set())
        held = sum(prod(shape) for shape in shapes.values()) * FP32_BYTES
        assert Fraction(2 * (replicas - 1), replicas) * held <= sent[PURPOSE] <= 2 * held
    small = (sent[purpose] for sent in (results[d]["sent"] for d in plan.devices) for purpose in ("loss", "norm"))
    assert max(small) <= 2 * 8


@pytest.mark.parametrize("world", ["4+4", "4+3"])
def test_shared_kv_heads_cost_their_further_holders_only(steps, world: str) -> None:
    """A key-value head on m devices is one all-reduce over m: the only bytes beyond data parallelism's."""
    plan, results = steps("qwen2-14q-2kv", world)
    extras = {device: shared_head_bytes(plan, device) for device in plan.devices}
    for device in plan.devices:
        ordinary = data_parallel_bytes(plan, results[device]["shapes"])
        assert results[device]["sent"][PURPOSE] == ordinary + extras[device]
    assert max(extras.values()) > 0


@pytest.mark.parametrize("world", ["4+3", "4+3 survivors", "4+3+2"])
def test_the_wire_carries_what_the_counters_say(steps, world: str) -> None:
    """The kernel's count of what each rank writes to its sockets, against the formula, for a whole reduction."""
    plan, results = steps(WHOLE_HEADS, world)
    for device in plan.devices:
        counted = float(results[device]["sent"][PURPOSE])
        assert results[device]["wire"] == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("world", PLANS)
def test_a_device_has_one_group_for_each_set_of_owners(steps, record_property, world: str) -> None:
    """All parameters fit one bucket here, so a step is one all-reduce for each process group of a device."""
    plan, results = steps(WHOLE_HEADS, world)
    members = {segment.members for spec in plan.structure.parameters for segment in segments_of(plan, spec)}
    groups = {device: len([each for each in members if device in each]) for device in plan.devices}
    record_property("groups_by_device", groups)
    for device in plan.devices:
        assert results[device]["calls"][PURPOSE] == groups[device]
    if world == "4+4":
        assert set(groups.values()) == {2}
    assert max(groups.values()) <= 5


def all_reduce_on_the_wire(world: World, num_bytes: int) -> tuple[int, float]:
    """Bytes that this rank wrote to its sockets in an all-reduce, and what the counter says that it sent."""
    group = world.everyone(purpose="wire")
    tensor = torch.ones(num_bytes // FP32_BYTES)
    group.all_reduce(tensor)
    before = written_bytes()
    group.all_reduce(tensor)
    return written_since(before), float(world.traffic.sent_bytes("wire") / 2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_formula_of_an_all_reduce_is_what_gloo_sends(pool: RankPool, num_ranks: int) -> None:
    num_bytes = 4 * 2**20
    for wire, counted in pool.run(all_reduce_on_the_wire, num_bytes, num_ranks=num_ranks):
        assert counted == pytest.approx(2 * (num_ranks - 1) / num_ranks * num_bytes)
        assert wire == pytest.approx(counted, rel=0.01)
