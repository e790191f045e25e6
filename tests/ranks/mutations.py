"""The nine faults found in public code for nonuniform tensor parallelism, each as a mutation of ours.

A mutation is a context manager, entered inside a rank process, that replaces one function of the product and
restores it. `test_mutations.py` shows that the parity check catches each of them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from tests import models, oracle
from tests.ranks import parity, test_steps
from uneven.comm import World
from uneven.errors import LayoutError, PeerLost
from uneven.layout import ModelLayout, ParallelPlan, ParameterSpec, Partition, Replicate, Segment, segments, segments_of
from uneven.parallel import attention, initialize
from uneven.parallel.loss import IGNORE, VocabParallelLoss
from uneven.reshard import Tile
from uneven.sync import GradReducer, buckets

SHORT_TIMEOUT_S = 2.0


@contextmanager
def segments_by(rule: Callable[[ParallelPlan, ParameterSpec], tuple[Segment, ...]]) -> Iterator[None]:
    """Every part of the product that asks for segments gets those of another rule."""
    with patch.object(buckets, "segments_of", rule), patch.object(segments, "segments_of", rule):
        yield


@contextmanager
def row_parallel_weights_in_another_order(plan: ParallelPlan, device: int) -> Iterator[None]:
    """Every second replica lays the elements of row-parallel gradients into its buffers column by column."""
    original = buckets.Piece

    def piece(start: int, tile: Tile, is_counted: bool) -> buckets.Piece:
        if tile.dim == 1 and plan.replica_of(device) % 2:
            tile = replace(tile, view=tile.view.view(tile.view.shape[1], tile.view.shape[0]).t())
        return original(start, tile, is_counted)

    with patch.object(buckets, "Piece", piece):
        yield


@contextmanager
def gate_and_up_cut_as_one_run(plan: ParallelPlan, device: int) -> Iterator[None]:
    """`[gate; up]` is cut into contiguous runs of rows: a device's first half of a run serves as its gate."""
    original = initialize._normal

    def normal(spec: ParameterSpec, layout: ModelLayout, *, device: int, seed: int) -> torch.Tensor:
        prefix, _, projection = spec.name.removesuffix(".weight").rpartition(".")
        if projection not in ("gate_proj", "up_proj"):
            return original(spec, layout, device=device, seed=seed)
        names = (f"{prefix}.{each}_proj.weight" for each in ("gate", "up"))
        whole = _undivided(layout)
        packed = torch.cat([original(whole.structure.parameter(each), whole, device=0, seed=seed) for each in names])
        ((start, stop),) = layout.spec_ranges(spec, device) or ()
        gate, up = packed[2 * start : 2 * stop].chunk(2)
        return gate if projection == "gate_proj" else up

    with patch.object(initialize, "_normal", normal):
        yield


def _undivided(layout: ModelLayout) -> ModelLayout:
    partitions = {module: Partition((0,) * axis.num_units) for module, axis in layout.structure.axes.items()}
    return ModelLayout(layout.structure, (0,), partitions)


@contextmanager
def one_holder_counts_for_a_shared_kv_head(plan: ParallelPlan, device: int) -> Iterator[None]:
    """Of the devices of a replica that share a key-value head, the first contributes its part of the gradient."""

    def rule(plan: ParallelPlan, spec: ParameterSpec) -> tuple[Segment, ...]:
        found = segments_of(plan, spec)
        if "k_proj" not in spec.name and "v_proj" not in spec.name:
            return found
        return tuple(replace(segment, contributors=_one_per_replica(plan, segment.members)) for segment in found)

    with segments_by(rule):
        yield


def _one_per_replica(plan: ParallelPlan, members: tuple[int, ...]) -> tuple[int, ...]:
    first_of = {plan.replica_of(member): member for member in reversed(members)}
    return tuple(sorted(first_of.values()))


@contextmanager
def as_many_queries_for_each_kv_head(plan: ParallelPlan, device: int) -> Iterator[None]:
    """A rank's query heads are dealt evenly to its key-value heads, as the stock `repeat_kv` does."""
    original = attention.queries_per_kv_head

    def evenly(units: Any, group: int) -> tuple[int, ...]:
        counts = original(units, group)
        return tuple([sum(counts) // len(counts)] * len(counts)) if counts else ()

    with patch.object(attention, "queries_per_kv_head", evenly):
        yield


@contextmanager
def replicated_parameters_summed_with_peers_only(plan: ParallelPlan, device: int) -> Iterator[None]:
    """Replicated parameters are summed over the devices of equal position; a position without a peer is left out."""

    def rule(plan: ParallelPlan, spec: ParameterSpec) -> tuple[Segment, ...]:
        if not isinstance(spec.placement, Replicate):
            return segments_of(plan, spec)
        degrees = [replica.layout.devices for replica in plan.replicas]
        peers = [tuple(d[i] for d in degrees if i < len(d)) for i in range(max(map(len, degrees)))]
        return tuple(Segment(spec.name, spec.whole, members, members) for members in sorted(peers))

    with segments_by(rule):
        yield


@contextmanager
def weights_not_permuted(plan: ParallelPlan, device: int) -> Iterator[None]:
    """Feed-forward weights are cut into contiguous runs of rows, whichever channels the layout gives a device."""
    original = initialize._normal

    def normal(spec: ParameterSpec, layout: ModelLayout, *, device: int, seed: int) -> torch.Tensor:
        contiguous = {
            module: Partition(tuple(sorted(partition.owners))) if module.endswith(".mlp") else partition
            for module, partition in layout.partitions.items()
        }
        return original(spec, replace(layout, partitions=contiguous), device=device, seed=seed)

    with patch.object(initialize, "_normal", normal):
        yield


@contextmanager
def extra_ranks_parts_left_unreduced(plan: ParallelPlan, device: int) -> Iterator[None]:
    """Only what the core ranks hold, the positions that every replica has, is summed between replicas."""
    core = min(len(replica.layout.devices) for replica in plan.replicas)
    extras = {extra for replica in plan.replicas for extra in replica.layout.devices[core:]}
    everyone = tuple(sorted(plan.devices))

    def launch(self: GradReducer) -> None:
        for buffer in self._buckets[self._next].buffers:
            if buffer.group.devices == everyone or not extras & set(buffer.group.devices):
                self._pending.append(buffer.group.start_all_reduce(buffer.flat))
        self._next += 1

    assert extras
    with patch.object(GradReducer, "_launch", launch):
        yield


@contextmanager
def groups_over_dead_slots(plan: ParallelPlan, device: int) -> Iterator[None]:
    """The group of replicated parameters is built over all slots, one of which is dead and not the last."""

    def rule(plan: ParallelPlan, spec: ParameterSpec) -> tuple[Segment, ...]:
        if not isinstance(spec.placement, Replicate):
            return segments_of(plan, spec)
        slots = tuple(range(max(plan.devices) + 1))
        return (Segment(spec.name, spec.whole, slots, slots),)

    with segments_by(rule):
        yield


@contextmanager
def mean_over_replicas(plan: ParallelPlan, device: int) -> Iterator[None]:
    """Each replica divides by its own number of tokens, and replicas are averaged with equal weight."""
    original = VocabParallelLoss.__call__

    def loss(self: VocabParallelLoss, *args: Any, **kwargs: Any) -> torch.Tensor:
        own_tokens = int((kwargs["shift_labels"] != IGNORE).sum())
        return original(self, *args, **kwargs | {"num_items_in_batch": own_tokens * len(plan.replicas)})

    with patch.object(VocabParallelLoss, "__call__", loss):
        yield


@contextmanager
def remainder_heads_dropped(plan: ParallelPlan, device: int) -> Iterator[None]:
    """A device takes no more than heads // degree heads; those left over belong to nobody."""
    original = Partition.intervals
    num_heads = next(axis.num_units for axis in plan.structure.axes.values() if axis.name == "heads")
    limit = num_heads // len(plan.layout_of(device).devices)

    def intervals(self: Partition, device: int) -> tuple[tuple[int, int], ...]:
        found = original(self, device)
        if len(self.owners) != num_heads:
            return found
        ((start, stop),) = found
        return ((start, min(stop, start + limit)),)

    with patch.object(Partition, "intervals", intervals):
        yield


Mutation = Callable[[ParallelPlan, int], AbstractContextManager[None]]


def mutated_gradients(world: World, mutation: Mutation, name: str, plan: ParallelPlan, rows: parity.Rows) -> Any:
    """The case `parity.gradients` with a fault in the product's code."""
    with mutation(plan, world.device):
        return parity.gradients(world, name, plan, rows)


def mutated_training(world: World, mutation: Mutation, course: test_steps.Course, plan: ParallelPlan) -> Any:
    """A training with a fault in the product's code."""
    with mutation(plan, world.device):
        return test_steps.train(world, course, plan)


def mutated_loss(world: World, mutation: Mutation, name: str, plan: ParallelPlan, rows: parity.Rows) -> float:
    """The job's loss alone, with a fault in the product's code."""
    with mutation(plan, world.device):
        model = parity.divided_model(models.model_spec(name), plan, world=world, dtype=torch.float64)
        mine = parity.own_rows(plan, rows, device=world.device)
        with torch.no_grad():
            loss = oracle.call(model, mine, num_tokens=rows[:, 1:].size)
    return parity.global_loss(world, plan, loss)


def mutated_error(
    world: World, mutation: Mutation, name: str, plan: ParallelPlan, rows: parity.Rows
) -> tuple[str, float] | None:
    """The message of the error that a fault ends in, and after how many seconds, at a timeout of SHORT_TIMEOUT_S."""
    started = time.monotonic()
    with patch.object(world, "_transport", replace(world._transport, timeout_s=SHORT_TIMEOUT_S)):
        try:
            mutated_gradients(world, mutation, name, plan, rows)
        except (PeerLost, LayoutError) as error:
            return str(error), time.monotonic() - started
    return None


def group_with_an_absent_member(world: World, absent: int) -> tuple[str, float] | None:
    """How joining a group ends of which one device of the job never comes, at a timeout of SHORT_TIMEOUT_S."""
    if world.device == absent:
        return None
    started = time.monotonic()
    with patch.object(world, "_transport", replace(world._transport, timeout_s=SHORT_TIMEOUT_S)):
        try:
            world.everyone(purpose="absent")
        except PeerLost as error:
            return str(error), time.monotonic() - started
    return None
