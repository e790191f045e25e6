"""The library's errors where a plan, a model and a job do not belong together."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests import models, oracle
from tests.ranks import parity
from uneven.errors import InputError, LayoutError, ModelError
from uneven.layout import ParallelPlan
from uneven.parallel import build_model, fill_random, parallelize
from uneven.parallel.attention import attend
from uneven.sync import GradReducer


def test_a_layout_of_the_same_shapes_but_other_heads_is_refused() -> None:
    wide = models.model_spec("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_size=64)
    narrow = models.model_spec("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=8, hidden_size=64)
    layout = ParallelPlan.from_shares(wide.structure, [[1]]).layout_of(0)
    with pytest.raises(LayoutError, match="the shapes agree, but its configuration groups heads or units otherwise"):
        parallelize(build_model(narrow, dtype=torch.float32), layout, world=oracle.lone_world())


def test_a_layout_of_another_size_is_refused_with_the_parameter() -> None:
    layout = ParallelPlan.from_shares(models.model_spec("llama").structure, [[1]]).layout_of(0)
    other = build_model(models.model_spec("llama", intermediate_size=64), dtype=torch.float32)
    with pytest.raises(LayoutError, match=r"gate_proj\.weight has shape \(64, 48\), the layout says \(352, 48\)"):
        parallelize(other, layout, world=oracle.lone_world())


def test_a_configuration_that_transformers_refuses_is_named() -> None:
    with pytest.raises(ModelError, match="transformers refuses this llama configuration: KeyError: 'wavy'"):
        build_model(models.model_spec("llama", hidden_act="wavy"), dtype=torch.float32)


def test_a_plan_with_devices_that_the_job_lacks_is_refused_at_once() -> None:
    spec = models.model_spec("llama")
    plan = ParallelPlan.from_shares(spec.structure, [[1, 1], [1]])
    model = build_model(spec, dtype=torch.float32)
    with pytest.raises(LayoutError, match=r"can't join a group of \[0, 1\]: \[1\] are not in this job"):
        parallelize(model, plan.layout_of(0), world=oracle.lone_world())
    with pytest.raises(LayoutError, match="it is not one of them"):
        oracle.lone_world().group([], purpose="x")
    with pytest.raises(LayoutError, match=r"the plan has the devices \[0, 1, 2\], this job \[0\]"):
        GradReducer(model, plan, world=oracle.lone_world())


@pytest.mark.parametrize("count", [0, -5])
def test_a_number_of_tokens_below_one_is_refused(count: int) -> None:
    spec = models.model_spec("llama")
    layout = ParallelPlan.from_shares(spec.structure, [[1]]).layout_of(0)
    model = parallelize(build_model(spec, dtype=torch.float64), layout, world=oracle.lone_world())
    fill_random(model, layout, spec=spec, device=0, seed=0)
    with pytest.raises(InputError, match=f"num_items_in_batch must be at least 1, found {count}"):
        oracle.call(model, models.token_batch(spec, 1), num_tokens=count)


def divided_alone(name: str) -> PreTrainedModel:
    """A model on one device, which is all of its replica."""
    spec = models.model_spec(name)
    plan = ParallelPlan.from_shares(spec.structure, [[1]])
    return parity.divided_model(spec, plan, world=oracle.lone_world(), dtype=torch.float32)


def test_an_argument_of_attention_that_would_change_the_result_is_refused_by_name() -> None:
    heads = torch.zeros(1, 2, 3, 4)
    for name, value in (("position_bias", torch.zeros(1, 2, 3, 3)), ("is_causal", False)):
        with pytest.raises(ModelError, match=f"Linear passes {name}, which this attention does not understand"):
            attend(nn.Linear(1, 1), heads, heads, heads, None, queries_per_kv=(1, 1), scaling=1.0, **{name: value})


def test_a_balance_loss_without_the_choices_of_the_whole_batch_is_refused() -> None:
    model = divided_alone("mixtral")
    with pytest.raises(InputError, match=r"call RouterLoss\.count before a step"):
        oracle.call(model, models.token_batch(models.model_spec("mixtral"), 2), num_tokens=22)
