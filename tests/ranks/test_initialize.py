"""Random weights are the same bits for every layout, and those of an ordinary initialisation."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import layouts, models, oracle
from tests.ranks.pool import RankPool
from uneven.comm import World
from uneven.layout import ParallelPlan
from uneven.modelspec import ModelSpec, parse_model
from uneven.parallel import build_model, fill_random, parallelize
from uneven.parallel.initialize import ELEMENTS_PER_BLOCK

SEED = 11


def local_weights(world: World, spec: ModelSpec, plan: ParallelPlan, seed: int) -> dict[str, Any]:
    """What one device holds after random initialisation in fp32."""
    layout = plan.layout_of(world.device)
    model = parallelize(build_model(spec, dtype=torch.float32), layout, world=world)
    fill_random(model, layout, spec=spec, device=world.device, seed=seed)
    # Nobody leaves, and closes its connections, while others still build the group.
    world.everyone(purpose="end").all_reduce(torch.zeros(1))
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def weights_of_one_device(spec: ModelSpec, *, seed: int = SEED) -> dict[str, torch.Tensor]:
    plan = ParallelPlan.from_shares(spec.structure, [[1]])
    weights = local_weights(oracle.lone_world(), spec, plan, seed)
    return {name: torch.from_numpy(weight) for name, weight in weights.items()}


def assert_same_bits(pool: RankPool, spec: ModelSpec, plan: ParallelPlan) -> None:
    whole = weights_of_one_device(spec)
    results = pool.run(local_weights, spec, plan, SEED, num_ranks=len(plan.devices))
    for device, local in enumerate(results):
        assert local.keys() == whole.keys()
        for name, weight in local.items():
            part = oracle.local_part(plan, name, whole[name], device=device)
            assert torch.equal(torch.from_numpy(weight), part), f"{name} on device {device}"


@pytest.mark.parametrize("world", ["2", "4", "4+3", "3+2+1 unequal"])
@pytest.mark.parametrize("name", ["llama-bias-tied-pad", "qwen3"])
def test_every_degree_draws_the_same_bits(pool: RankPool, name: str, world: str) -> None:
    spec = models.model_spec(name)
    assert_same_bits(pool, spec, ParallelPlan.from_shares(spec.structure, layouts.WORLDS[world]))


@pytest.mark.parametrize("special", layouts.SPECIAL)
def test_unusual_partitions_draw_the_same_bits(pool: RankPool, special: str) -> None:
    spec = models.model_spec("llama-bias-tied-pad")
    assert_same_bits(pool, spec, layouts.special_plan(spec.structure, special))


def test_parts_that_cross_blocks_draw_the_same_bits(pool: RankPool) -> None:
    """Parameters of more than one block of random numbers, divided by rows and by columns."""
    spec = models.model_spec("llama", hidden_size=528, intermediate_size=2100, vocab_size=2100, num_hidden_layers=1)
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ):
        assert spec.structure.parameter(name).num_elements > ELEMENTS_PER_BLOCK
    assert_same_bits(pool, spec, layouts.special_plan(spec.structure, "interleaved"))


def test_blocks_of_a_parameter_differ_from_each_other() -> None:
    spec = models.model_spec("llama", hidden_size=528, vocab_size=2100, num_hidden_layers=1)
    rows = ELEMENTS_PER_BLOCK // 528
    table = weights_of_one_device(spec)["model.embed_tokens.weight"]
    assert not torch.equal(table[rows:], table[: 2100 - rows])


def test_another_seed_draws_other_weights() -> None:
    spec = models.model_spec("qwen3")
    first, second = weights_of_one_device(spec), weights_of_one_device(spec, seed=SEED + 1)
    again = weights_of_one_device(spec)
    for parameter in spec.structure.parameters:
        assert torch.equal(first[parameter.name], again[parameter.name])
        assert torch.equal(first[parameter.name], second[parameter.name]) == (parameter.init != "normal")


def test_parameters_of_equal_shape_differ_from_each_other() -> None:
    weights = weights_of_one_device(models.model_spec("llama"))
    drawn = [weights[f"model.layers.{layer}.mlp.{each}_proj.weight"] for layer in (0, 1) for each in ("gate", "up")]
    for index, weight in enumerate(drawn):
        assert not any(torch.equal(weight, other) for other in drawn[index + 1 :])


@pytest.mark.parametrize("name", models.MODELS)
def test_weights_start_as_transformers_starts_them(name: str) -> None:
    """Ones and zeros where it has them, norms for the most part and biases; everything else normal."""
    spec = models.model_spec(name)
    weights = weights_of_one_device(spec)
    settings = {key: value for key, value in spec.config.items() if key != "model_type"}
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(spec.family, **settings))
    needed = {key: value.detach() for key, value in stock.named_parameters()}
    for parameter in spec.structure.parameters:
        weight = weights[parameter.name]
        if len(needed[parameter.name].unique()) == 1:
            assert torch.equal(weight, needed[parameter.name]), parameter.name
        elif parameter.num_elements >= 30:  # of a few draws the deviation says little
            # Of n draws the mean deviates by sigma/sqrt(n), sigma by 1/sqrt(2n) of itself: five times that.
            deviation = spec.init_std / np.sqrt(parameter.num_elements)
            assert abs(float(weight.mean())) < 5 * deviation, parameter.name
            assert abs(float(weight.std()) - spec.init_std) < 5 * deviation + 0.02 * spec.init_std, parameter.name


def test_the_row_of_the_padding_token_is_zero() -> None:
    spec = models.model_spec("llama-bias-tied-pad")
    assert spec.pad_token_id == 7
    table = weights_of_one_device(spec)["model.embed_tokens.weight"]
    assert torch.count_nonzero(table[7]) == 0
    assert int((table == 0).all(dim=1).sum()) == 1


def test_initializer_range_of_the_model_is_the_deviation() -> None:
    wide, narrow = (models.model_spec("llama", initializer_range=each) for each in (0.2, 0.02))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert wide.init_std == 0.2
    torch.testing.assert_close(weights_of_one_device(wide)[name], 10 * weights_of_one_device(narrow)[name])
    default = parse_model({key: value for key, value in wide.config.items() if key != "initializer_range"})
    assert default.init_std == 0.02
