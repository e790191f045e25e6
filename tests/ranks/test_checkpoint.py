"""A job's state is written by any layout and read by any other, bit for bit, and by plain transformers.

The devices of a job take turns in this process: writing and reading communicate nothing.
"""

import random
from collections import defaultdict
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import models
from tests.job_state import Job, plan_of, random_state, save_stock
from uneven.checkpoint.export import saved_buffers
from uneven.checkpoint.folder import Checkpoint, newest, open_checkpoint
from uneven.checkpoint.manifest import BLOCK_BYTES, Slice
from uneven.checkpoint.restore import read_tiles
from uneven.checkpoint.to_folder import export_checkpoint
from uneven.checkpoint.write import copy_tiles, start_writing, written_by
from uneven.errors import CheckpointError, CheckpointRefused
from uneven.layout import ModelStructure, length, shards_of, states_held, union, without
from uneven.reshard import Tile, Tiles


@pytest.mark.parametrize(
    ("name", "copies", "worlds"),
    [
        ("llama", "all", ("interleaved", "another in each layer")),
        ("qwen2-14q-2kv", 1, ("2+2+1", "1")),
        ("gpt-neox", 2, ("3+2+1 unequal", "no rows on the first")),
        ("phi3", "all", ("2+2+1", "interleaved")),
        ("mixtral", 1, ("2+2+1", "1")),
        ("gpt-oss", 2, ("2+2+1", "no heads on the last")),
        ("qwen3-moe-whole", 2, ("3+2+1 unequal", "another in each layer")),
        ("deepseek-v3", 1, ("2+2+1", "1")),
    ],
)
def test_any_layout_reads_what_another_has_written(
    tmp_path: Path, name: str, copies: Any, worlds: tuple[str, ...]
) -> None:
    spec = models.model_spec(name)
    state = random_state(spec)
    journey = ("4+3", *worlds, "4+3")
    here = Job.of(spec, plan_of(spec, journey[0]), copies=copies, state=state)
    for step, world in enumerate(journey[1:]):
        there = Job.of(spec, plan_of(spec, world), copies=copies)
        there.load(here.save(tmp_path, step=step))
        there.assert_equal(Job.of(spec, there.plan, copies=copies, state=state))
        here = there


def test_a_bf16_model_gets_masters_and_their_rounding(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    state = random_state(spec)
    checkpoint = Job.of(spec, plan_of(spec, "2+1"), copies=1, state=state).save(tmp_path)
    plan = plan_of(spec, "3+2+1 unequal")
    reader = Job.of(spec, plan, copies=1)
    for device in plan.devices:
        local = reader.local[device]
        local["value"] = {name: tensor.bfloat16() for name, tensor in local["value"].items()}
    reader.load(checkpoint)
    needed = Job.of(spec, plan, copies=1, state=state)
    for local in needed.local.values():
        local["value"] = {name: tensor.bfloat16() for name, tensor in local["value"].items()}
    reader.assert_equal(needed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_of_other_precisions_are_kept_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    spec = models.model_spec("qwen3")
    state = random_state(spec, dtype)
    checkpoint = Job.of(spec, plan_of(spec, "2+1"), state=state).save(tmp_path)
    zeros = {kind: {name: torch.zeros_like(t) for name, t in tensors.items()} for kind, tensors in state.items()}
    there = Job.of(spec, plan_of(spec, "3"), state=zeros)
    there.load(checkpoint)
    there.assert_equal(Job.of(spec, there.plan, state=state))


# Bytes


WIDE = {"hidden_size": 256, "vocab_size": 3001, "num_hidden_layers": 1}
"""A model whose embedding has a dozen blocks."""


def bytes_asked_of_the_system() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def elements(structure: ModelStructure, name: str, start: int, stop: int) -> int:
    return structure.parameter(name).count(((start, stop),))


def blocks_touched(checkpoint: Checkpoint, wanted: list[tuple[str, Tiles]]) -> int:
    """Bytes of all blocks that hold a byte of a wanted tile, once for each tile."""
    places, structure = defaultdict(list), checkpoint.manifest.structure
    for stored in (stored for part in checkpoint.manifest.parts for stored in part.tensors):
        places[stored.slice.name, stored.slice.kind].append(stored.slice)
    total = 0
    for kind, name, tile in (
        (kind, name, tile) for kind, tiles in wanted for name, own in tiles.items() for tile in own
    ):
        for own in places[name, kind]:
            low, high = max(own.start, tile.start), min(own.stop, tile.stop)
            start, stop, end = (4 * elements(structure, name, own.start, at) for at in (low, high, own.stop))
            blocks = range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1) if low < high else ()
            total += sum(min(BLOCK_BYTES, end - block * BLOCK_BYTES) for block in blocks)
    return total


def test_a_rank_reads_the_blocks_of_its_share(tmp_path: Path) -> None:
    spec = models.model_spec("llama", **WIDE)
    checkpoint = Job.of(spec, plan_of(spec, "4+3"), copies=1, state=random_state(spec)).save(tmp_path)
    for world in ("4+3", "2+2+1", "interleaved"):
        reader = Job.of(spec, plan_of(spec, world))
        for device in reader.plan.devices:
            wanted = reader.wanted_by(device)
            tiles = [(name, tile) for _, found in wanted for name, own in found.items() for tile in own]
            share = 4 * sum(elements(spec.structure, name, tile.start, tile.stop) for name, tile in tiles)
            before = bytes_asked_of_the_system()
            count = read_tiles(checkpoint, wanted)
            asked = bytes_asked_of_the_system() - before
            assert count == blocks_touched(checkpoint, wanted)
            assert count <= asked < count + 1000  # /proc/self/io itself is read too
            assert count == share if world == "4+3" else count >= share


def test_a_part_is_a_file_of_safetensors_with_the_divided_dim_first(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    state = random_state(spec)
    checkpoint = Job.of(spec, plan_of(spec, "2"), state=state).save(tmp_path)
    found = load_file(checkpoint.folder / "rank-1.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(found[f"{name}/exp_avg/176:352"], state["exp_avg"][name][:, 176:].t())
    part = checkpoint.manifest.parts[1]
    assert (part.file, part.num_bytes) == ("rank-1.safetensors", (checkpoint.folder / part.file).stat().st_size)
    assert len(found) == len(part.tensors)


# Who writes what


@pytest.mark.parametrize("copies", [1, 2, "all"])
@pytest.mark.parametrize("world", ["1", "4+3", "2+2+1", "interleaved", "no rows on the first"])
def test_each_element_is_written_once_by_one_that_keeps_its_state(world: str, copies: Any) -> None:
    spec = models.model_spec("llama", num_hidden_layers=8)
    plan = plan_of(spec, world)
    shards = shards_of(plan, copies)
    written, kept = written_by(plan, shards, buffers={"scale": (2, 3), "none": ()}), states_held(plan, shards)
    assert written.keys() == set(plan.devices)
    assert written[0].pop("scale") == ((0, 6),)
    assert written[0].pop("none") == ((0, 1),)
    for each in spec.structure.parameters:
        parts = [own[each.name] for own in written.values() if each.name in own]
        assert union(part for ranges in parts for part in ranges) == each.whole
        assert sum(map(length, parts)) == length(each.whole)
    loads = []
    for device, own in written.items():
        assert all(not without(ranges, kept[device][name]) for name, ranges in own.items())
        loads.append(sum(spec.structure.parameter(name).count(ranges) for name, ranges in own.items()))
    if copies != 1:  # there is a choice
        assert max(loads) * len(loads) < 1.05 * sum(loads)


# Damage


def test_a_flipped_byte_anywhere_in_what_is_read_is_found(tmp_path: Path) -> None:
    spec = models.model_spec("llama", **WIDE)
    job = Job.of(spec, plan_of(spec, "2"), state=random_state(spec))
    checkpoint = job.save(tmp_path)
    chance = random.Random(1)
    reader = Job.of(spec, plan_of(spec, "3"))
    for part in checkpoint.manifest.parts:
        file = checkpoint.folder / part.file
        first = min(stored.offset for stored in part.tensors)
        last = file.stat().st_size - 1
        for place in (first, last, *(chance.randrange(first, last) for _ in range(3))):
            flip(file, place)
            with pytest.raises(CheckpointRefused, match=rf"{file}: is damaged: bytes .*, in [\w.]+ \(.*\), don't have"):
                reader.load(open_checkpoint(checkpoint.folder))
            flip(file, place)
    reader.load(checkpoint)


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte[0] ^ 16]))


def test_what_is_gone_while_it_is_read_is_refused_with_its_file(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    job = Job.of(spec, plan_of(spec, "2"), state=random_state(spec))
    checkpoint = job.save(tmp_path)
    file = checkpoint.folder / "rank-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointRefused, match=f"{file}: can't read the checkpoint: it became shorter"):
        job.load(checkpoint)
    file.unlink()
    with pytest.raises(CheckpointRefused, match=f"{file}: can't read the checkpoint: No such file"):
        job.load(checkpoint)


# Writing


def test_a_copy_does_not_change_with_its_tensor() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    copy = copy_tiles([("value", {"a": (Tile(4, 7, 1, tensor),)})], {"a": ((0, 5), (6, 9)), "b": ((0, 1),)})
    tensor.zero_()
    assert [each for each, _ in copy] == [Slice("a", "value", 4, 5), Slice("a", "value", 6, 7)]
    assert [found.tolist() for _, found in copy] == [[[0.0, 3.0]], [[2.0, 5.0]]]


class Held(torch.Tensor):
    """A tensor of a disk that is slow: it is written once `gate` is done."""

    gate: Future[None] = Future()

    def contiguous(self) -> torch.Tensor:
        self.gate.result(10)
        return self.as_subclass(torch.Tensor).contiguous()


def test_a_part_is_written_beside_the_job(tmp_path: Path) -> None:
    writing = start_writing(((Slice("a", "value", 0, 2), torch.ones(2, 3).as_subclass(Held)),), tmp_path / "f")
    assert not wait([writing], 0.01).done
    Held.gate.set_result(None)
    part = writing.result(60)
    assert (part.file, part.num_bytes) == ("f", (tmp_path / "f").stat().st_size)


def test_what_the_disk_refuses_is_told_with_the_file(tmp_path: Path) -> None:
    for file, reason in ((tmp_path / "none" / "f", "No such file or directory"), (tmp_path, "File exists")):
        with pytest.raises(CheckpointError, match=f"{file}: can't write the checkpoint: {reason}"):
            start_writing((), file).result(60)


# Export


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("gemma3", torch.float32),
        ("phi3", torch.bfloat16),
        ("mixtral", torch.float32),
        ("qwen3-moe-whole", torch.bfloat16),
        ("deepseek-v3", torch.float32),
    ],
)
def test_an_exported_checkpoint_is_the_model_in_plain_transformers(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    stock = save_stock(tmp_path, name, dtype, world="2+2+1")
    extras = tmp_path / "tokenizer"
    extras.mkdir()
    (extras / "generation_config.json").write_text('{"eos_token_id": 9}')
    heard: list[tuple[int, int]] = []
    checkpoint, out = newest(tmp_path), tmp_path / "out"
    export_checkpoint(checkpoint, out, extras=extras, progress=lambda *each: heard.append(each), max_file_bytes=200_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(out)
    assert type(again) is type(stock)
    assert again.dtype == dtype
    assert again.generation_config.eos_token_id == 9
    found, needed = again.state_dict(), stock.state_dict()
    assert found.keys() == needed.keys()
    kept = {key for key, _ in saved_buffers(stock)}
    for key, value in needed.items():
        assert torch.equal(found[key], value.to(dtype) if key not in kept else value.to(found[key].dtype)), key
    assert heard[-1] == (checkpoint.manifest.structure.num_parameters,) * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "out", "tokenizer"]


def test_a_damaged_checkpoint_leaves_no_folder(tmp_path: Path) -> None:
    save_stock(tmp_path, "llama", torch.float32, world="2")
    checkpoint = newest(tmp_path)
    stored = checkpoint.manifest.parts[1].tensors[-1]  # of a kind that is read by no export
    flip(checkpoint.folder / "rank-1.safetensors", stored.offset)
    assert stored.slice.kind == "exp_avg_sq"
    export_checkpoint(checkpoint, tmp_path / "whole")
    flip(checkpoint.folder / "rank-1.safetensors", checkpoint.manifest.parts[1].tensors[0].offset)
    with pytest.raises(CheckpointRefused, match=r"rank-1\.safetensors: is damaged"):
        export_checkpoint(checkpoint, tmp_path / "out")
    strange = replace(checkpoint, manifest=replace(checkpoint.manifest, dtype="int7"))
    with pytest.raises(CheckpointRefused, match="unknown dtype 'int7'"):
        export_checkpoint(strange, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "whole"]
