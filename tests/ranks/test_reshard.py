"""Exchanges between plans move bits: there and back again is the identity, and no more is sent than must be."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from tests import models
from tests.ranks.pool import RankPool
from uneven.comm import World
from uneven.layout import (
    Band,
    Copies,
    Holdings,
    LogicalAxis,
    ModelLayout,
    ModelStructure,
    ParallelPlan,
    ParameterSpec,
    Partition,
    ReplicaPlan,
    Replicate,
    Shard,
    parameters_held,
    shards_of,
    states_held,
    transfers,
)
from uneven.parallel import take_ranges
from uneven.reshard import Exchange, Tile, copy_common, exchange, flat_tiles, tiles_of

NUM_RANKS = 5
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
STRUCTURE = ModelStructure(
    "odd",
    {
        "attn": LogicalAxis("heads", 6),
        "mlp": LogicalAxis("mlp", 23, 4),
        "vocab": LogicalAxis("vocab", 11, 2),
        "experts": LogicalAxis("experts", 5),
    },
    (
        ParameterSpec("vocab.weight", (11, 3), Shard(0, "vocab", (Band(0, 11, 2),)), "normal"),
        ParameterSpec(
            "qkv.weight", (26, 5), Shard(0, "attn", (Band(0, 18, 3), Band(18, 4, 2, 3), Band(22, 4, 2, 3))), "normal"
        ),
        ParameterSpec("o.weight", (5, 18), Shard(1, "attn", (Band(0, 18, 3),)), "normal"),
        ParameterSpec("down.weight", (3, 23), Shard(1, "mlp", (Band(0, 23, 4),)), "normal"),
        ParameterSpec("experts.weight", (5, 3, 7), Shard(0, "experts", (Band(0, 5, 1),)), "normal"),
        ParameterSpec("experts.down", (3, 7, 23), Shard(2, "mlp", (Band(0, 23, 4),)), "normal"),
        ParameterSpec("experts.up", (3, 46, 5), Shard(1, "mlp", (Band(0, 23, 4), Band(23, 23, 4))), "normal"),
        ParameterSpec("norm.weight", (3,), Replicate("copied"), "ones"),
    ),
)


def random_plan(structure: ModelStructure, draw: random.Random) -> ParallelPlan:
    """Some of the devices in one to three replicas, with any owners; often a device holds nothing of a module."""
    devices = draw.sample(range(NUM_RANKS), draw.randint(1, NUM_RANKS))
    cuts = sorted(draw.sample(range(1, len(devices)), min(len(devices) - 1, draw.randint(0, 2))))
    replicas = []
    for start, stop in pairwise([0, *cuts, len(devices)]):
        members = tuple(devices[start:stop])
        partitions = {}
        for module, axis in structure.axes.items():
            holding = draw.sample(members, draw.randint(1, len(members)))
            partitions[module] = Partition(tuple(draw.choice(holding) for _ in range(axis.num_units)))
        replicas.append(ReplicaPlan(ModelLayout(structure, members, partitions), 1))
    return ParallelPlan(tuple(replicas))


@dataclass(frozen=True, slots=True)
class Tour:
    """Plans one after another; what is moved are parameters, or state in so many copies where `copies` is given."""

    plans: tuple[ParallelPlan, ...]
    dtype: torch.dtype
    copies: Copies | None = None
    batch_elements: int = exchange.BATCH_ELEMENTS

    def held(self, plan: ParallelPlan) -> Holdings:
        return parameters_held(plan) if self.copies is None else states_held(plan, shards_of(plan, self.copies))


def whole_of(spec: ParameterSpec, dtype: torch.dtype) -> torch.Tensor:
    """Random bits, not-a-numbers among them."""
    bits = BITS[dtype]
    limits = torch.iinfo(bits)
    generator = torch.Generator().manual_seed(sum(map(ord, spec.name)))
    return torch.randint(limits.min, limits.max, spec.shape, dtype=bits, generator=generator).view(dtype)


def empty_tiles(tour: Tour, plan: ParallelPlan, *, device: int) -> dict[str, list[Tile]]:
    """Room for what a device holds under a plan, in tensors as models and optimizers have them."""
    tiles: dict[str, list[Tile]] = {}
    if device not in plan.devices:
        return tiles
    layout = plan.layout_of(device)
    if tour.copies is None:
        for spec in plan.structure.parameters:
            local = torch.zeros(layout.local_shape(spec, device), dtype=tour.dtype)
            tiles[spec.name] = list(tiles_of(local, spec, ranges=layout.held(spec, device)))
        return tiles
    for shard in shards_of(plan, tour.copies):
        if device in shard.holders:
            flat = torch.zeros(shard.num_elements, dtype=tour.dtype)
            for name, found in flat_tiles(flat, shard.parts).items():
                tiles.setdefault(name, []).extend(found)
    return tiles


def differing(tour: Tour, tiles: dict[str, list[Tile]]) -> Iterator[str]:
    """The parameters of which a tile has other bits than it should."""
    for spec in tour.plans[0].structure.parameters:
        whole = whole_of(spec, tour.dtype)
        for tile in tiles.get(spec.name, ()):
            needed = whole.narrow(spec.dim, tile.start, tile.stop - tile.start)
            found = [each.contiguous().view(BITS[tour.dtype]) for each in (tile.view, needed)]
            if not torch.equal(*found):
                yield spec.name


@dataclass(frozen=True, slots=True)
class Leg:
    """What one rank found after one change of plan."""

    wrong: tuple[str, ...]
    sent_bytes: int
    received_bytes: int
    num_batches: int


def travel(world: World, tour: Tour) -> list[Leg]:
    """One rank: fill the tiles of the first plan, and move them from plan to plan."""
    group = world.everyone(purpose="reshard")
    tiles = empty_tiles(tour, tour.plans[0], device=world.device)
    for spec in tour.plans[0].structure.parameters:
        for tile in tiles.get(spec.name, ()):
            tile.view.copy_(whole_of(spec, tour.dtype).narrow(spec.dim, tile.start, tile.stop - tile.start))
    legs = []
    for before, after in pairwise(tour.plans):
        sent, received = world.traffic.sent_bytes("reshard"), world.traffic.received_bytes("reshard")
        calls = world.traffic.calls("reshard")
        target = empty_tiles(tour, after, device=world.device)
        copy_common(tiles, target)
        moves = transfers(tour.held(before), tour.held(after), structure=after.structure)
        if moves:
            with patch.object(exchange, "BATCH_ELEMENTS", tour.batch_elements):
                route = Exchange(moves, source=tiles, target=target, group=group)
            route.run(dtype=tour.dtype)
        traffic = world.traffic
        legs.append(
            Leg(
                tuple(differing(tour, target)),
                int(traffic.sent_bytes("reshard") - sent),
                traffic.received_bytes("reshard") - received,
                (traffic.calls("reshard") - calls) // 2,
            )
        )
        tiles = target
    return legs


def assert_moved(pool: RankPool, tour: Tour) -> int:
    """The most batches that a change took."""
    legs = pool.run(travel, tour, num_ranks=NUM_RANKS)
    for index, (before, after) in enumerate(pairwise(tour.plans)):
        moves = transfers(tour.held(before), tour.held(after), structure=after.structure)
        for device in range(NUM_RANKS):
            leg = legs[device][index]
            assert leg.wrong == ()
            sent, received = (
                sum(m.num_elements for m in moves if device == end(m)) * tour.dtype.itemsize
                for end in (lambda move: move.source, lambda move: move.destination)
            )
            assert (leg.sent_bytes, leg.received_bytes) == (sent, received)
    return max(leg.num_batches for each in legs for leg in each)


def there_and_back(structure: ModelStructure, *, seed: int) -> tuple[ParallelPlan, ...]:
    """Random plans, the first of which is the last one too."""
    draw = random.Random(seed)
    plans = [random_plan(structure, draw) for _ in range(9)]
    return (*plans, plans[0])


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("copies", [None, "all", 2])
def test_there_and_back_again_is_the_identity(pool: RankPool, dtype: torch.dtype, copies: Copies | None) -> None:
    seed = list(BITS).index(dtype)
    assert_moved(pool, Tour(there_and_back(STRUCTURE, seed=seed), dtype, copies))


def test_a_single_copy_moves_too(pool: RankPool) -> None:
    assert_moved(pool, Tour(there_and_back(STRUCTURE, seed=3), torch.float32, 1))


@pytest.mark.parametrize("copies", [None, 2])
def test_batches_change_nothing(pool: RankPool, copies: Copies | None) -> None:
    plans = there_and_back(STRUCTURE, seed=4)
    assert assert_moved(pool, Tour(plans, torch.float32, copies)) == 1
    assert assert_moved(pool, Tour(plans, torch.float32, copies, batch_elements=100)) > 5
    most = assert_moved(pool, Tour(plans, torch.float32, copies, batch_elements=1))
    held = Tour(plans, torch.float32, copies).held
    assert most == max(len(transfers(held(a), held(b), structure=STRUCTURE)) for a, b in pairwise(plans))


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "phi3"])
def test_a_models_parts_move(pool: RankPool, name: str) -> None:
    structure = models.model_spec(name, num_hidden_layers=1, vocab_size=251).structure
    assert_moved(pool, Tour(there_and_back(structure, seed=5)[-3:], torch.bfloat16))
    assert_moved(pool, Tour(there_and_back(structure, seed=5)[-3:], torch.float32, 2))


def test_tiles_are_what_take_ranges_takes() -> None:
    plan = random_plan(STRUCTURE, random.Random(6))
    for device in plan.devices:
        layout = plan.layout_of(device)
        for spec in STRUCTURE.parameters:
            whole = whole_of(spec, torch.float32)
            local = take_ranges(whole, spec, ranges=layout.ranges(spec.name, device))
            tiles = tiles_of(local, spec, ranges=layout.held(spec, device))
            parts = [whole.narrow(spec.dim, tile.start, tile.stop - tile.start) for tile in tiles]
            assert all(
                torch.equal(tile.view.view(torch.int32), part.view(torch.int32))
                for tile, part in zip(tiles, parts, strict=True)
            )
