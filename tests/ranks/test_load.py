"""Weights of a Hugging Face folder, written by plain transformers, arrive bit for bit in any layout; and go back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import layouts, models, oracle
from tests.ranks.pool import RankPool
from uneven.checkpoint import export_model, load_model
from uneven.comm import World
from uneven.errors import ModelError
from uneven.layout import ParallelPlan
from uneven.parallel import build_model, parallelize

SMALL_FILE_BYTES = 200_000


def load_and_export(world: World, name: str, plan: ParallelPlan, source: Path, target: Path) -> dict[str, Any]:
    """On one rank: what it loaded; the first replica writes the model again."""
    spec = models.model_spec(name)
    layout = plan.layout_of(world.device)
    model = parallelize(build_model(spec, dtype=torch.float32), layout, world=world)
    load_model(model, layout, folder=source, device=world.device)
    if plan.replica_of(world.device) == 0:
        export_model(model, layout, spec=spec, world=world, folder=target, max_file_bytes=SMALL_FILE_BYTES)
    return {key: value.detach().numpy() for key, value in model.named_parameters()}


@pytest.mark.parametrize("max_shard_size", ["1GB", "150KB"])
@pytest.mark.parametrize("name", ["llama-bias-tied-pad", "qwen3"])
def test_a_folder_loads_and_comes_back_bit_for_bit(
    pool: RankPool, tmp_path: Path, name: str, max_shard_size: str
) -> None:
    spec = models.model_spec(name)
    stock = oracle.stock_model(spec, seed=5, dtype=torch.float32).requires_grad_(False)
    stock.save_pretrained(tmp_path / "source", max_shard_size=max_shard_size)
    (tmp_path / "target").mkdir()
    plan = layouts.special_plan(spec.structure, "interleaved")
    results = pool.run(load_and_export, name, plan, tmp_path / "source", tmp_path / "target", num_ranks=5)
    whole = dict(stock.named_parameters())
    for device, found in enumerate(results):
        for key, local in found.items():
            assert torch.equal(torch.from_numpy(local), oracle.local_part(plan, key, whole[key], device=device))
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    for key, value in again.named_parameters():
        assert torch.equal(value, whole[key])


def load_alone(source: Path, **overrides: Any) -> None:
    spec = models.model_spec("llama", **overrides)
    layout = ParallelPlan.from_shares(spec.structure, [[1]]).layout_of(0)
    model = parallelize(build_model(spec, dtype=torch.float32), layout, world=oracle.lone_world())
    load_model(model, layout, folder=source, device=0)


def test_a_folder_of_another_model_is_refused_with_file_and_parameter(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    oracle.stock_model(spec, seed=5, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors: .*gate_proj.*\(352, 48\).*\(64, 48\)"):
        load_alone(tmp_path, intermediate_size=64)
    with pytest.raises(ModelError, match=r"model\.safetensors: can't read .*layers\.2\."):
        load_alone(tmp_path, num_hidden_layers=3)


def test_a_damaged_folder_is_refused_with_its_file(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    oracle.stock_model(spec, seed=5, dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="150KB")
    index = tmp_path / "model.safetensors.index.json"
    listing = json.loads(index.read_text())
    file = tmp_path / listing["weight_map"]["model.norm.weight"]
    assert load_file(file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=file.name):
        load_alone(tmp_path)
    file.unlink()
    with pytest.raises(ModelError, match=file.name):
        load_alone(tmp_path)
    del listing["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(listing))
    with pytest.raises(ModelError, match=r"names no file for model\.norm\.weight"):
        load_alone(tmp_path)
    index.write_text("{")
    with pytest.raises(ModelError, match="malformed index"):
        load_alone(tmp_path)
