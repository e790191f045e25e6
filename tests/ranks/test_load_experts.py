"""Experts, which transformers writes one by one and keeps stacked, arrive in any division of experts or channels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from uneven.checkpoint.export import saved_buffers
from uneven.checkpoint.load import load_model
from uneven.layout import Band, LogicalAxis, ModelLayout, ModelStructure, ParameterSpec, Partition, Replicate, Shard
from uneven.parallel import take_ranges

EXPERTS, CHANNELS = 4, 12
OWNERS = {"experts": (0, 1, 1, 0), "mlp": (1, 0, 1)}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": CHANNELS, "num_local_experts": EXPERTS},
    "qwen3_moe": {"moe_intermediate_size": CHANNELS, "num_experts": EXPERTS},
    "deepseek_v3": {
        **{"moe_intermediate_size": CHANNELS, "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8},
        **{"qk_nope_head_dim": 8, "v_head_dim": 8},
    },
}


def stock_model(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(
        family,
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"vocab_size": 64, "num_experts_per_tok": 2, "pad_token_id": None, "bos_token_id": None},
        **{"eos_token_id": None},
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32).requires_grad_(False)
    for name, buffer in stock.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    return stock


def layout_of(stock: PreTrainedModel, *, axis: str) -> ModelLayout:
    """Two devices, which divide the experts, or the channels of every expert in runs of four."""
    specs = []
    for name, parameter in stock.named_parameters():
        placement: Shard | Replicate = Replicate()
        if ".experts." in name and axis == "experts":
            placement = Shard(0, "m", (Band(0, EXPERTS, 1),))
        elif name.endswith("experts.gate_up_proj"):
            placement = Shard(1, "m", (Band(0, CHANNELS, 4), Band(CHANNELS, CHANNELS, 4)))
        elif name.endswith("experts.down_proj"):
            placement = Shard(2, "m", (Band(0, CHANNELS, 4),))
        specs.append(ParameterSpec(name, tuple(parameter.shape), placement, "normal"))
    units = LogicalAxis("experts", EXPERTS) if axis == "experts" else LogicalAxis("mlp", CHANNELS, 4)
    structure = ModelStructure("of experts", {"m": units}, tuple(specs))
    return ModelLayout(structure, (0, 1), {"m": Partition(OWNERS[axis])})


def load_on(device: int, layout: ModelLayout, *, stock: PreTrainedModel, folder: Path) -> dict[str, torch.Tensor]:
    """What `device` gets into a model that has room for its part and nothing else."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(stock.config)
    for spec in layout.structure.parameters:
        module, _, attribute = spec.name.rpartition(".")
        local = torch.full(layout.local_shape(spec, device), float("nan"))
        setattr(model.get_submodule(module), attribute, nn.Parameter(local))
    buffers = dict(saved_buffers(stock))
    for name in buffers:
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module).register_buffer(attribute, torch.zeros(EXPERTS))
    count = load_model(model, layout, folder=folder, device=device)
    assert count.tensors == 4 * (layout.local_elements(device) + sum(buffer.numel() for buffer in buffers.values()))
    for name, buffer in buffers.items():
        assert torch.equal(model.get_buffer(name), buffer)
    return dict(model.named_parameters())


@pytest.mark.parametrize("axis", OWNERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_read_by_their_share(tmp_path: Path, family: str, axis: str) -> None:
    stock = stock_model(family)
    assert len(dict(saved_buffers(stock))) == (family == "deepseek_v3"), "what steers its router"
    stock.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any(name.endswith("gate_up_proj") for name in stored), "stored one by one"
    layout = layout_of(stock, axis=axis)
    for device in layout.devices:
        found = load_on(device, layout, stock=stock, folder=tmp_path)
        for spec in layout.structure.parameters:
            whole = stock.get_parameter(spec.name)
            assert torch.equal(found[spec.name], take_ranges(whole, spec, ranges=layout.spec_ranges(spec, device)))


def test_experts_that_lie_stacked_are_read_too(tmp_path: Path) -> None:
    stock = stock_model("mixtral")
    save_file({name: value.clone() for name, value in stock.named_parameters()}, tmp_path / "model.safetensors")
    layout = layout_of(stock, axis="mlp")
    for device in layout.devices:
        found = load_on(device, layout, stock=stock, folder=tmp_path)
        for spec in layout.structure.parameters:
            whole = stock.get_parameter(spec.name)
            assert torch.equal(found[spec.name], take_ranges(whole, spec, ranges=layout.spec_ranges(spec, device)))
