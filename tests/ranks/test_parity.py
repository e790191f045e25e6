"""Loss and every gradient of every layout equal one process with the stock model, in float64 at 1e-12."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests import layouts, models, oracle
from tests.ranks.pool import RankPool
from uneven.comm import World
from uneven.layout import ParallelPlan
from uneven.parallel import build_model, fill_random, parallelize
from uneven.sync import GradReducer

TOLERANCE = 1e-12
BATCH = 7
SEED = 3
SMALL_BUCKETS = 64 * 1024


def gradients(world: World, name: str, plan: ParallelPlan, rows: np.ndarray[Any, Any]) -> tuple[float, dict[str, Any]]:
    """On one rank: the job's loss, and this rank's reduced gradients."""
    spec = models.model_spec(name)
    layout = plan.layout_of(world.device)
    model = parallelize(build_model(spec, dtype=torch.float64), layout, world=world)
    fill_random(model, layout, spec=spec, device=world.device, seed=SEED)
    reducer = GradReducer(model, plan, world=world, bucket_bytes=SMALL_BUCKETS)
    replica = plan.replica_of(world.device)
    samples = plan.samples(len(rows))
    first = sum(samples[:replica])
    reducer.begin()
    loss = oracle.call(model, rows[first : first + samples[replica]], num_tokens=rows[:, 1:].size)
    loss.backward()
    reduced = reducer.finish().by_name()
    is_leader = world.device == layout.devices[0]
    total = world.everyone(purpose="loss").all_reduce(loss.detach() * is_leader)
    return float(total), {key: value.numpy() for key, value in reduced.items()}


@cache
def truth(name: str) -> tuple[np.ndarray[Any, Any], float, dict[str, torch.Tensor]]:
    spec = models.model_spec(name)
    rows = models.token_batch(spec, BATCH)
    return rows, *oracle.stock_gradients(spec, rows, seed=SEED)


def assert_parity(pool: RankPool, name: str, plan: ParallelPlan) -> None:
    rows, loss, expected = truth(name)
    results = pool.run(gradients, name, plan, rows, num_ranks=len(plan.devices))
    for device, (found_loss, found) in enumerate(results):
        assert abs(found_loss - loss) <= TOLERANCE * abs(loss)
        for spec in plan.structure.parameters:
            part = oracle.local_part(plan, spec.name, expected[spec.name], device=device)
            if part.numel() == 0:
                assert spec.name not in found
                continue
            whole = expected[spec.name]
            error = oracle.relative_error(torch.from_numpy(found[spec.name]), part, scale=whole)
            assert error <= TOLERANCE, f"{spec.name} on device {device}: relative error {error:.2e}"


@pytest.mark.parametrize("world", layouts.WORLDS)
@pytest.mark.parametrize("name", models.MODELS)
def test_loss_and_gradients_equal_one_process(pool: RankPool, name: str, world: str) -> None:
    plan = ParallelPlan.from_shares(models.model_spec(name).structure, layouts.WORLDS[world])
    assert_parity(pool, name, plan)


@pytest.mark.parametrize("special", layouts.SPECIAL)
@pytest.mark.parametrize("name", models.MODELS)
def test_unusual_partitions_equal_one_process(pool: RankPool, name: str, special: str) -> None:
    assert_parity(pool, name, layouts.special_plan(models.model_spec(name).structure, special))
