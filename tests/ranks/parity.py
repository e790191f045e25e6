"""A divided job and one process on the same batch: what each computes, and how far apart they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests import models, oracle
from tests.ranks.pool import RankPool
from uneven.comm import World
from uneven.layout import MAX_GROUPS_PER_DEVICE, ParallelPlan
from uneven.modelspec import ModelSpec
from uneven.parallel import build_model, fill_random, parallelize, recompute_activations
from uneven.sync import GradReducer

TOLERANCE = 1e-12
BATCH = 7
SEED = 3
SMALL_BUCKETS = 64 * 1024

Rows = np.ndarray[Any, Any]


def divided_model(spec: ModelSpec, plan: ParallelPlan, *, world: World, dtype: torch.dtype) -> PreTrainedModel:
    """This rank's part of a model with random weights."""
    layout = plan.layout_of(world.device)
    model = parallelize(build_model(spec, dtype=dtype), layout, world=world)
    fill_random(model, layout, spec=spec, device=world.device, seed=SEED)
    return model


def own_rows(plan: ParallelPlan, rows: Rows, *, device: int) -> Rows:
    """The samples of a global batch that this device's replica takes."""
    own = plan.batch_range(plan.replica_of(device), global_batch=len(rows))
    return rows[own.start : own.stop]


def global_loss(world: World, plan: ParallelPlan, loss: torch.Tensor) -> float:
    """The job's loss: each replica's part, counted once."""
    is_leader = world.device == plan.layout_of(world.device).devices[0]
    return float(world.everyone(purpose="loss").all_reduce(loss.detach() * is_leader))


def count_choices(model: PreTrainedModel, plan: ParallelPlan, micro_batches: list[Rows], *, world: World) -> None:
    """What a mixture with a balance loss needs before a step."""
    router = model.loss_function.router
    if router is None:
        return

    def forward() -> None:
        for rows in micro_batches:
            oracle.call(model, rows, num_tokens=1)

    is_leader = world.device == plan.layout_of(world.device).devices[0]
    router.count(forward, group=world.everyone(purpose="router"), is_counted=is_leader)


@dataclass(frozen=True, slots=True)
class Variant:
    """How a job computes: with activations computed again in backward, with few process groups."""

    recompute: bool = False
    max_groups: int = MAX_GROUPS_PER_DEVICE


def gradients(
    world: World, name: str, plan: ParallelPlan, rows: Rows, variant: Variant = Variant()
) -> tuple[float, dict[str, Rows]] | None:
    """On one rank: the job's loss, and this rank's reduced gradients; None on a rank that is not in the plan."""
    if world.device not in plan.devices:
        return None
    world = world.scoped("job", plan.devices)
    model = divided_model(models.model_spec(name), plan, world=world, dtype=torch.float64)
    if variant.recompute:
        recompute_activations(model)
    reducer = GradReducer(model, plan, world=world, bucket_bytes=SMALL_BUCKETS, max_groups=variant.max_groups)
    mine = own_rows(plan, rows, device=world.device)
    loss = torch.zeros((), dtype=torch.float64)
    count_choices(model, plan, [mine] if len(mine) else [], world=world)
    reducer.begin(1 if len(mine) else 0)
    if len(mine):
        loss = oracle.call(model, mine, num_tokens=rows[:, 1:].size)
        loss.backward()
    reduced = reducer.finish().by_name()
    return global_loss(world, plan, loss), {key: value.numpy() for key, value in reduced.items()}


@dataclass(frozen=True, slots=True)
class Truth:
    """What one process computes with the stock model on the whole batch."""

    rows: Rows
    loss: float
    gradients: Mapping[str, torch.Tensor]


@cache
def truth(name: str, *, batch: int = BATCH) -> Truth:
    spec = models.model_spec(name)
    rows = models.token_batch(spec, batch)
    return Truth(rows, *oracle.stock_gradients(spec, rows, seed=SEED))


@dataclass(frozen=True, slots=True)
class Deviation:
    """Relative errors of a job: of its loss, and of the gradient of each parameter on each device."""

    loss: float
    gradients: Mapping[tuple[int, str], float]

    @property
    def worst_gradient(self) -> float:
        return max(self.gradients.values())

    def wrong(self, threshold: float = TOLERANCE) -> dict[tuple[int, str], float]:
        """The gradients whose error is above a threshold, or not a number."""
        return {key: error for key, error in self.gradients.items() if not error <= threshold}


def deviation(results: list[Any], plan: ParallelPlan, needed: Truth) -> Deviation:
    """How far the results of `gradients`, by device, are from the truth."""
    losses, errors = [], {}
    for device in plan.devices:
        loss, found = results[device]
        losses.append(abs(loss - needed.loss) / abs(needed.loss))
        for spec in plan.structure.parameters:
            whole = needed.gradients[spec.name]
            part = oracle.local_part(plan, spec.name, whole, device=device)
            if part.numel() == 0:
                assert spec.name not in found
                continue
            error = oracle.relative_error(torch.from_numpy(found[spec.name]), part, scale=whole)
            errors[device, spec.name] = error
    return Deviation(max(losses), errors)


def assert_parity(
    pool: RankPool, name: str, plan: ParallelPlan, *, batch: int = BATCH, variant: Variant = Variant()
) -> Deviation:
    needed = truth(name, batch=batch)
    results = pool.run(gradients, name, plan, needed.rows, variant, num_ranks=max(plan.devices) + 1)
    found = deviation(results, plan, needed)
    assert found.loss <= TOLERANCE
    assert not found.wrong()
    return found
