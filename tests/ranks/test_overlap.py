"""Gradients are reduced while backward still runs, and what a reducer is not told of is an error."""

import pytest
import torch

from tests import models, oracle
from tests.ranks.pool import RankPool
from uneven.comm import World
from uneven.errors import InputError
from uneven.layout import ParallelPlan
from uneven.parallel import build_model, fill_random, parallelize
from uneven.sync import PURPOSE, GradReducer

SMALL_BUCKETS = 64 * 1024


def launched_in_backward(world: World, plan: ParallelPlan) -> tuple[int, int, int]:
    """On one rank: sums launched when the first layer's gradient comes, when backward ends, and in all."""
    spec = models.model_spec("llama")
    layout = plan.layout_of(world.device)
    model = parallelize(build_model(spec, dtype=torch.float64), layout, world=world)
    fill_random(model, layout, spec=spec, device=world.device, seed=0)
    reducer = GradReducer(model, plan, world=world, bucket_bytes=SMALL_BUCKETS)
    seen: list[int] = []
    first = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    first.register_post_accumulate_grad_hook(lambda _: seen.append(world.traffic.calls(PURPOSE)))
    rows = models.token_batch(spec, 2)
    reducer.begin()
    oracle.call(model, rows, num_tokens=rows[:, 1:].size).backward()
    after_backward = world.traffic.calls(PURPOSE)
    reducer.finish()
    return seen[0], after_backward, world.traffic.calls(PURPOSE)


def test_sums_are_launched_while_backward_runs(pool: RankPool) -> None:
    plan = ParallelPlan.from_shares(models.model_spec("llama").structure, [[1, 1], [1]])
    for at_first_layer, after_backward, in_all in pool.run(launched_in_backward, plan, num_ranks=3):
        assert 0 < at_first_layer < in_all
        assert after_backward == in_all


def test_a_backward_pass_that_was_not_announced_is_an_error() -> None:
    spec = models.model_spec("llama")
    plan = ParallelPlan.from_shares(spec.structure, [[1]])
    world = oracle.lone_world()
    layout = plan.layout_of(0)
    model = parallelize(build_model(spec, dtype=torch.float64), layout, world=world)
    fill_random(model, layout, spec=spec, device=0, seed=0)
    reducer = GradReducer(model, plan, world=world)
    rows = models.token_batch(spec, 2)

    def backward() -> None:
        oracle.call(model, rows, num_tokens=rows[:, 1:].size).backward()

    with pytest.raises(InputError, match=r"after all 0 backward passes"):
        backward()
    model.zero_grad()
    reducer.begin(1)
    backward()
    with pytest.raises(InputError, match=r"after all 1 backward passes"):
        backward()
