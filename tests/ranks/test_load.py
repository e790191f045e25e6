"""Weights of a Hugging Face folder, written by plain transformers, arrive bit for bit in any layout; and go back.

Each rank reads its own share and no more: the bytes are counted, and the system's own count must agree.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests import layouts, models, oracle
from tests.ranks.pool import RankPool
from uneven.checkpoint.export import export_model
from uneven.checkpoint.load import load_model
from uneven.comm import World
from uneven.errors import ModelError
from uneven.layout import ParallelPlan
from uneven.modelspec import BytesRead
from uneven.parallel import build_model, parallelize

SMALL_FILE_BYTES = 200_000
ITEM_BYTES = 4


def load_and_export(
    world: World, name: str, plan: ParallelPlan, source: Path, target: Path
) -> tuple[dict[str, Any], BytesRead, int]:
    """On one rank: what it loaded, its own count of bytes, and the system's; the first replica writes it again."""
    spec = models.model_spec(name)
    layout = plan.layout_of(world.device)
    model = parallelize(build_model(spec, dtype=torch.float32), layout, world=world)
    before = bytes_asked_of_the_system()
    count = load_model(model, layout, folder=source, device=world.device)
    asked = bytes_asked_of_the_system() - before
    if plan.replica_of(world.device) == 0:
        export_model(model, layout, spec=spec, world=world, folder=target, max_file_bytes=SMALL_FILE_BYTES)
    return {key: value.detach().numpy() for key, value in model.named_parameters()}, count, asked


def bytes_asked_of_the_system() -> int:
    """What this process has read from files so far, from the disk or the page cache."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


ONE_FILE = ("gemma3", "olmo2", "phi3", "phi", "gpt-neox", "mixtral", "qwen3-moe-whole", "deepseek-v3", "gpt-oss")


@pytest.mark.parametrize(
    ("name", "max_shard_size"),
    [
        *((name, size) for name in ("llama-bias-tied-pad", "qwen3") for size in ("1GB", "150KB")),
        *((name, "1GB") for name in ONE_FILE),
    ],
)
def test_a_folder_loads_and_comes_back_bit_for_bit(
    pool: RankPool, tmp_path: Path, name: str, max_shard_size: str
) -> None:
    spec = models.model_spec(name)
    stock = oracle.stock_model(spec, seed=5, dtype=torch.float32).requires_grad_(False)
    for key, buffer in stock.named_buffers():
        if "e_score_correction_bias" in key:
            buffer.normal_()
    stock.save_pretrained(tmp_path / "source", max_shard_size=max_shard_size)
    (tmp_path / "target").mkdir()
    plan = layouts.special_plan(spec.structure, "interleaved")
    results = pool.run(load_and_export, name, plan, tmp_path / "source", tmp_path / "target", num_ranks=5)
    whole = dict(stock.named_parameters())
    state = {key: value for key, value in stock.state_dict().items() if "e_score_correction_bias" in key}
    num_state = sum(value.numel() for value in state.values())  # each rank holds and reads all of it
    headers = header_bytes(tmp_path / "source", num_elements=sum(p.numel() for p in whole.values()) + num_state)
    for device, (found, count, asked) in enumerate(results):
        for key, local in found.items():
            assert torch.equal(torch.from_numpy(local), oracle.local_part(plan, key, whole[key], device=device))
        share = ITEM_BYTES * (plan.layout_of(device).local_elements(device) + num_state)
        assert count == BytesRead(headers, share)
        assert headers + share <= asked < headers + share + 1000  # /proc/self/io itself is read too
        assert headers + share < sum(file.stat().st_size for file in (tmp_path / "source").glob("model*"))
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    for key, value in again.named_parameters():
        assert torch.equal(value, whole[key])
    for key, value in state.items():
        assert torch.equal(again.state_dict()[key], value)


def header_bytes(folder: Path, *, num_elements: int) -> int:
    """All of the files that is no data of tensors."""
    return sum(file.stat().st_size for file in folder.glob("model*")) - ITEM_BYTES * num_elements


def load_alone(source: Path, **overrides: Any) -> nn.Module:
    spec = models.model_spec("llama", **overrides)
    layout = ParallelPlan.from_shares(spec.structure, [[1]]).layout_of(0)
    model = parallelize(build_model(spec, dtype=torch.float32), layout, world=oracle.lone_world())
    load_model(model, layout, folder=source, device=0)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_are_converted_to_the_models_own(tmp_path: Path, dtype: torch.dtype) -> None:
    stock = oracle.stock_model(models.model_spec("llama"), seed=5, dtype=dtype).requires_grad_(False)
    stock.save_pretrained(tmp_path)
    for (_, found), (name, needed) in zip(
        load_alone(tmp_path).named_parameters(), stock.named_parameters(), strict=True
    ):
        assert torch.equal(found, needed.float()), name


def test_a_base_model_with_a_tied_embedding_is_read_without_its_prefix(tmp_path: Path) -> None:
    spec = models.model_spec("llama", tie_word_embeddings=True)
    stock = oracle.stock_model(spec, seed=5, dtype=torch.float32).requires_grad_(False)
    stock.model.save_pretrained(tmp_path)
    assert "norm.weight" in load_file(tmp_path / "model.safetensors")
    for name, found in load_alone(tmp_path, tie_word_embeddings=True).named_parameters():
        assert torch.equal(found, stock.get_parameter(name)), name


def test_a_tied_head_that_is_stored_as_well_must_be_the_embedding(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    oracle.stock_model(spec, seed=5, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*tie_word_emb"):
        load_alone(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert load_alone(tmp_path, tie_word_embeddings=True)


def test_a_folder_of_another_model_is_refused_with_file_and_parameter(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    oracle.stock_model(spec, seed=5, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors: .*gate_proj.*\(352, 48\).*\(64, 48\)"):
        load_alone(tmp_path, intermediate_size=64)
    with pytest.raises(ModelError, match=r"model\.safetensors: .*needs model\.layers\.2\..*and 8 more.*lack"):
        load_alone(tmp_path, num_hidden_layers=3)


def test_a_damaged_folder_is_refused_with_its_file(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    oracle.stock_model(spec, seed=5, dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="150KB")
    index = tmp_path / "model.safetensors.index.json"
    listing = json.loads(index.read_text())
    file = tmp_path / listing["weight_map"]["model.norm.weight"]
    assert load_file(file)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=f"{file.name}: .* is damaged"):
        load_alone(tmp_path)
    file.unlink()
    with pytest.raises(ModelError, match=f"{file.name}: can't read weights: No such file"):
        load_alone(tmp_path)
    index.write_text("{")
    with pytest.raises(ModelError, match="malformed index"):
        load_alone(tmp_path)
