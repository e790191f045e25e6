"""Structures name every parameter of the stock transformers models, with their shapes."""

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests import models
from uneven.layout import Replicate, Shard
from uneven.modelspec import FAMILIES, parse_model, read_model
from uneven.modelspec.read import DEFAULT_MODEL
from uneven.parallel import build_model
from uneven.parallel.describe import describe

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama without kv heads": {"model_type": "llama", "num_key_value_heads": None},
    "llama bias": {"model_type": "llama", "attention_bias": True},
    "llama all biases, tied": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama head width": {"model_type": "llama", "head_dim": 10},
    "mistral": {"model_type": "mistral"},
    "mistral head width": {"model_type": "mistral", "head_dim": 24},
    "mistral with keys of llama": {"model_type": "mistral", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 head width": {"model_type": "qwen2", "head_dim": 12},
    "qwen2 with keys of llama": {"model_type": "qwen2", "attention_bias": False, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 bias": {"model_type": "qwen3", "attention_bias": True, "mlp_bias": True},
    "qwen3 tied, head width": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 14},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_attention_heads": 16, "hidden_size": 64},
    "qwen2": {"num_attention_heads": 64, "hidden_size": 128},
    "qwen3": {"num_attention_heads": 64, "hidden_size": 32},
    "llama": {},
}


def stock_parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the stock model, without its weights."""
    settings = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings))
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def described_parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    parameters = parse_model(config).structure.parameters
    described = {spec.name: spec.shape for spec in parameters}
    assert len(described) == len(parameters)
    return described


@pytest.mark.parametrize("name", CONFIGS)
def test_structures_equal_the_stock_models(name: str) -> None:
    config = SIZES | CONFIGS[name]
    assert described_parameters(config) == stock_parameters(config)


@pytest.mark.parametrize("family", DEFAULTS)
def test_defaults_of_a_family_are_those_of_transformers(family: str) -> None:
    """Of the number of key-value heads and the head width, where the configuration does not say."""
    config = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    config |= {"model_type": family} | DEFAULTS[family]
    assert described_parameters(config) == stock_parameters(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_default_in_the_table_is_that_of_transformers(family: str) -> None:
    stock = AutoConfig.for_model(family)
    for key, value in FAMILIES[family].defaults.items():
        assert getattr(stock, key) == value, key


DIVIDED_OTHERWISE = {"colwise_gather_output", "rowwise_split_input", "moe_tp_experts", "embedding_rowwise"}
"""Styles with which transformers leaves a module whole, or that name the experts' module as such."""


@pytest.mark.parametrize("name", models.MODELS)
def test_structures_agree_with_the_plan_of_transformers(name: str) -> None:
    """What the plan calls column-parallel is divided along outputs here, what it calls row-parallel along inputs."""
    spec = models.model_spec(name)
    stock = AutoConfig.for_model(spec.family)
    body = FAMILIES[spec.family].body
    num_checked = 0
    for parameter in spec.structure.parameters:
        path = re.sub(r"\.\d+\.", ".*.", parameter.name.removeprefix(f"{body}.").removesuffix(".weight"))
        style = stock.base_model_tp_plan.get(path)
        is_whole_expert = name.endswith("-whole") and ".experts." in path
        if style is None or style in DIVIDED_OTHERWISE or is_whole_expert:
            continue
        num_checked += 1
        if style == "replicated_with_grad_allreduce":
            assert parameter.placement == Replicate("partial")
        else:
            assert isinstance(parameter.placement, Shard)
            from_the_end = 1 if style == "rowwise" else 2
            assert parameter.placement.dim == len(parameter.shape) - from_the_end
    assert num_checked or name in ("phi3", "gpt-oss")  # whose plans divide nothing in this way


@pytest.mark.parametrize(
    "name", ["llama-bias-tied-pad", "qwen2-14q-2kv", "qwen3", "gemma2", "gemma3", "granite", "cohere2"]
)
def test_the_table_and_the_plan_describe_the_same(name: str) -> None:
    """Two independent ways to one structure, for families that both of them can describe."""
    needed = models.model_spec(name).structure
    found = describe(build_model(models.model_spec(name), dtype=torch.float32))
    assert found.axes == needed.axes
    assert {spec.name: spec for spec in found.parameters} == {spec.name: spec for spec in needed.parameters}


@pytest.mark.parametrize("name", models.MODELS)
def test_the_models_of_the_parity_tests_are_described_in_full(name: str) -> None:
    config = dict(models.model_spec(name).config)
    assert described_parameters(config) == stock_parameters(config)


def test_the_default_model_is_described_in_full() -> None:
    config = dict(read_model(DEFAULT_MODEL).config)
    assert described_parameters(config) == stock_parameters(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_matrix_is_divided_and_no_norm_is(name: str) -> None:
    for spec in parse_model(SIZES | CONFIGS[name]).structure.parameters:
        if spec.name.endswith("norm.weight"):
            assert isinstance(spec.placement, Replicate)
            is_per_head = "q_norm" in spec.name or "k_norm" in spec.name
            assert spec.placement.grad == ("partial" if is_per_head else "copied")
            assert spec.init == "ones"
        elif spec.name.endswith("weight"):
            assert isinstance(spec.placement, Shard)
            assert spec.placement.dim == (1 if "o_proj" in spec.name or "down_proj" in spec.name else 0)
            assert spec.init == "normal"
        else:
            is_row_parallel = "o_proj" in spec.name or "down_proj" in spec.name
            assert isinstance(spec.placement, Replicate) == is_row_parallel
            assert spec.init == "zeros"
