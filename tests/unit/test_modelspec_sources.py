"""From tensors on disk to parameters: names, regions of stacked experts, and what a device reads of each."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import models
from tests.weight_files import shapes_of, write_weights
from uneven.errors import ModelError
from uneven.layout import Band, ParameterSpec, Replicate, Shard
from uneven.modelspec import Source, assemble, parse_model, pieces_of, read_stored, sources_of

LAYER = "model.layers.3"
NUM_EXPERTS, CHANNELS, HIDDEN = 4, 6, 5
UP = ParameterSpec(f"{LAYER}.mlp.experts.gate_up_proj", (NUM_EXPERTS, 2 * CHANNELS, HIDDEN), Replicate(), "normal")
DOWN = ParameterSpec(f"{LAYER}.mlp.experts.down_proj", (NUM_EXPERTS, HIDDEN, CHANNELS), Replicate(), "normal")
QWEN = [f"{LAYER}.mlp.experts.{e}.{p}_proj.weight" for e in range(NUM_EXPERTS) for p in ("gate", "up", "down")]
MIXTRAL = [f"{LAYER}.block_sparse_moe.experts.{e}.w{p}.weight" for e in range(NUM_EXPERTS) for p in (1, 2, 3)]


def test_a_parameter_is_one_tensor_of_its_name() -> None:
    spec = ParameterSpec("model.norm.weight", (8,), Replicate(), "ones")
    assert sources_of(spec, ["model.norm.weight"]) == (Source("model.norm.weight", (0,), (8,)),)


def test_a_base_model_has_no_prefix() -> None:
    spec = ParameterSpec("model.norm.weight", (8,), Replicate(), "ones")
    assert sources_of(spec, ["norm.weight"]) == (Source("norm.weight", (0,), (8,)),)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        (f"{LAYER}.mlp.gate.weight", f"{LAYER}.block_sparse_moe.gate.weight"),
        ("lm_head.weight", "embed_out.weight"),
    ],
)
def test_some_names_differ_on_disk(name: str, stored: str) -> None:
    spec = ParameterSpec(name, (4, 5), Replicate(), "normal")
    assert sources_of(spec, [stored]) == (Source(stored, (0, 0), (4, 5)),)
    assert sources_of(spec, [stored, name]) == (Source(name, (0, 0), (4, 5)),)


@pytest.mark.parametrize(
    ("names", "gate", "up", "down"),
    [
        (QWEN, "mlp.experts.2.gate_proj", "mlp.experts.2.up_proj", "mlp.experts.2.down_proj"),
        (MIXTRAL, "block_sparse_moe.experts.2.w1", "block_sparse_moe.experts.2.w3", "block_sparse_moe.experts.2.w2"),
    ],
)
def test_stacked_experts_lie_one_by_one(names: list[str], gate: str, up: str, down: str) -> None:
    found = sources_of(UP, names)
    assert len(found) == 2 * NUM_EXPERTS
    assert found[4] == Source(f"{LAYER}.{gate}.weight", (2, 0, 0), (CHANNELS, HIDDEN))
    assert found[5] == Source(f"{LAYER}.{up}.weight", (2, CHANNELS, 0), (CHANNELS, HIDDEN))
    assert found[5].region == ((2, 3), (CHANNELS, 2 * CHANNELS), (0, HIDDEN))
    found = sources_of(DOWN, names)
    assert len(found) == NUM_EXPERTS
    assert found[2] == Source(f"{LAYER}.{down}.weight", (2, 0, 0), (HIDDEN, CHANNELS))


def test_stacked_experts_may_lie_stacked() -> None:
    assert sources_of(UP, [UP.name, *QWEN]) == (Source(UP.name, (0, 0, 0), UP.shape),)


def test_the_way_of_storing_that_is_nearest_says_what_is_missing() -> None:
    missing = {source.name for source in sources_of(UP, MIXTRAL[3:])} - set(MIXTRAL[3:])
    assert missing == {MIXTRAL[0], MIXTRAL[2]}


def whole_experts(spec: ParameterSpec, stored: dict[str, np.ndarray[Any, Any]], names: list[str]) -> np.ndarray:
    """The stacked parameter as transformers makes it: stack the experts, then concatenate gate and up."""
    gates, ups, downs = (np.stack([stored[name] for name in names[part::3]]) for part in range(3))
    return np.concatenate([gates, ups], 1) if spec is UP else downs


@pytest.mark.parametrize(("dim", "spec"), [*product((0, 1, 2), (UP, DOWN))])
def test_pieces_fill_a_devices_part_of_stacked_experts(dim: int, spec: ParameterSpec) -> None:
    """Whatever the dimension and the ranges: experts divided as units, or the channels of each."""
    generator = np.random.default_rng(dim)
    shapes = [(CHANNELS, HIDDEN), (CHANNELS, HIDDEN), (HIDDEN, CHANNELS)] * NUM_EXPERTS
    stored = {name: generator.normal(size=shape) for name, shape in zip(QWEN, shapes, strict=True)}
    whole = whole_experts(spec, stored, QWEN)
    size = spec.shape[dim]
    sharded = ParameterSpec(spec.name, spec.shape, Shard(dim, "m", (Band(0, size, 1),)), "normal")
    for ranges in (((0, size),), ((0, 1), (2, 4)), ((1, size),), ((size - 1, size), (0, 2)), ()):
        needed = np.concatenate([np.take(whole, range(*each), dim) for each in [(0, 0), *ranges]], dim)
        part = np.full_like(needed, np.nan)
        for source in sources_of(sharded, QWEN):
            for piece in pieces_of(source, sharded, ranges=ranges):
                found = np.take(stored[source.name], range(*piece.elements), piece.dim)
                part[tuple(slice(*interval) for interval in piece.region)] = found
        np.testing.assert_array_equal(part, needed)


# A whole model


def refusal(folder: Path, **overrides: Any) -> str:
    with pytest.raises(ModelError) as caught:
        assemble(models.model_spec("llama", **overrides).structure, read_stored(folder))
    return str(caught.value)


def test_weights_of_this_model_are_found(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    write_weights(tmp_path / "model.safetensors", shapes_of(spec) | buffers, dtype="BF16")
    assembly = assemble(spec.structure, read_stored(tmp_path))
    assert [each.name for each in assembly.sources] == list(shapes_of(spec))
    assert not assembly.copies


def test_fewer_and_more_tensors_are_counted_and_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, shapes_of(models.model_spec("llama")))
    message = refusal(tmp_path, num_hidden_layers=3)
    assert message == (
        f"{file}: not the weights of this model: the model needs model.layers.2.self_attn.q_proj.weight and 8 more "
        f"tensors, which the files lack"
    )
    message = refusal(tmp_path, num_hidden_layers=1)
    assert message == (
        f"{file}: not the weights of this model: the files hold model.layers.1.self_attn.q_proj.weight and 8 more "
        f"tensors, which the model lacks"
    )


def test_a_head_is_needed_unless_it_is_tied(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    write_weights(tmp_path / "model.safetensors", shapes_of(spec, without=["lm_head.weight"]))
    assert "the model needs lm_head.weight, which the files lack" in refusal(tmp_path)
    tied = models.model_spec("llama", tie_word_embeddings=True)
    assert not assemble(tied.structure, read_stored(tmp_path)).copies


def test_a_tied_embedding_may_be_stored_as_the_head_or_twice(tmp_path: Path) -> None:
    spec = models.model_spec("llama", tie_word_embeddings=True)
    table = spec.structure.parameters[0]
    head = {"lm_head.weight": table.shape}
    write_weights(tmp_path / "model.safetensors", shapes_of(spec, without=[table.name]) | head)
    assembly = assemble(spec.structure, read_stored(tmp_path))
    assert assembly.sources[table] == (Source("lm_head.weight", (0, 0), table.shape),)
    assert not assembly.copies
    write_weights(tmp_path / "model.safetensors", shapes_of(spec) | head)
    assembly = assemble(spec.structure, read_stored(tmp_path))
    assert assembly.sources[table] == (Source(table.name, (0, 0), table.shape),)
    assert assembly.copies == {table: Source("lm_head.weight", (0, 0), table.shape)}


def test_layers_that_predict_further_tokens_are_no_part_of_the_model(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    names = ("eh_proj.weight", "enorm.weight", "mlp.experts.0.up_proj.weight", "mlp.gate.e_score_correction_bias")
    further = {f"model.layers.2.{name}": (3,) for name in names}
    write_weights(tmp_path / "model.safetensors", shapes_of(spec) | further)
    assert not assemble(spec.structure, read_stored(tmp_path)).buffers


def test_buffers_that_are_part_of_a_model_are_told_from_those_that_it_computes(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    write_weights(tmp_path / "model.safetensors", shapes_of(spec) | {bias: (3,), "model.rotary_emb.inv_freq": (3,)})
    assert assemble(spec.structure, read_stored(tmp_path)).buffers == (bias,)


@pytest.mark.parametrize("dtype", ["I32", "F8_E4M3"])
def test_numbers_that_can_not_be_trained_are_refused(tmp_path: Path, dtype: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    file = tmp_path / "model.safetensors"
    write_weights(file, shapes_of(models.model_spec("llama")), dtypes={name: dtype})
    assert refusal(tmp_path).startswith(f"{file}: {name} has dtype {dtype}; training needs plain floating-point")


def test_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, shapes_of(models.model_spec("llama")))
    assert refusal(tmp_path, intermediate_size=64) == (
        f"{file}: model.layers.0.mlp.gate_proj.weight has shape (352, 48), the model's configuration says (64, 48)"
    )


def test_the_default_model_has_no_weights_of_another(tmp_path: Path) -> None:
    """Names alone decide nothing: equal names of other sizes are refused by shape."""
    spec = models.model_spec("llama")
    write_weights(tmp_path / "model.safetensors", shapes_of(spec))
    with pytest.raises(ModelError, match="has shape"):
        assemble(parse_model({**spec.config, "vocab_size": 17}).structure, read_stored(tmp_path))
