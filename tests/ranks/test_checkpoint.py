"""A job's state is written by any layout and read by any other, bit for bit, and by plain transformers.

The devices of a job take turns in this process: writing and reading communicate nothing.
"""

import random
import threading
from collections import defaultdict
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
from uneven.checkpoint.manifest import BLOCK_BYTES
from uneven.checkpoint.restore import read_slices
from uneven.checkpoint.slices import Slice
from uneven.checkpoint.to_folder import export_checkpoint
from uneven.checkpoint.write import HostCopy, Writer, copy_slices
from uneven.errors import CheckpointError, CheckpointRefused


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


def test_a_bf16_model_gets_its_masters_and_their_rounding(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    state = random_state(spec)
    checkpoint = Job.of(spec, plan_of(spec, "2+1"), copies=1, state=state).save(tmp_path)
    plan = plan_of(spec, "3+2+1 unequal")
    masters, rounded = Job.of(spec, plan, copies=1), Job.of(spec, plan, copies=1)
    for tensors in rounded.local.values():
        tensors["value"] = {name: tensor.bfloat16() for name, tensor in tensors["value"].items()}
    masters.load(checkpoint)
    for device in plan.devices:
        read_slices(checkpoint, rounded.wanted_by(device, ("value",)))
        for each, tensor in rounded.local[device]["value"].items():
            assert torch.equal(tensor, masters.local[device]["value"][each].bfloat16())
    masters.assert_equal(Job.of(spec, plan, copies=1, state=state))


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


def blocks_touched(checkpoint: Checkpoint, wanted: list[Slice]) -> int:
    """Bytes of all blocks that hold a byte of a wanted column, once for each slice wanted."""
    places = defaultdict(list)
    for stored in (stored for part in checkpoint.manifest.parts for stored in part.tensors):
        places[stored.slice.name, stored.slice.kind].append(stored)
    total = 0
    for each, stored in ((wish, stored) for wish in wanted for stored in places[wish.name, wish.kind]):
        low, high = (min(max(c, stored.slice.columns[0]), stored.slice.columns[1]) for c in each.columns)
        start, stop = ((c - stored.slice.columns[0]) * stored.num_bytes // stored.slice.shape[1] for c in (low, high))
        blocks = range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1) if start < stop else ()
        total += sum(min(BLOCK_BYTES, stored.num_bytes - block * BLOCK_BYTES) for block in blocks)
    return total


def test_a_rank_reads_the_blocks_of_its_share_and_the_manifest(tmp_path: Path) -> None:
    spec = models.model_spec("llama", **WIDE)
    writer = Job.of(spec, plan_of(spec, "4+3"), state=random_state(spec))
    checkpoint = writer.save(tmp_path)
    for world, is_same in (("4+3", True), ("2+2+1", False), ("interleaved", False)):
        reader = Job.of(spec, plan_of(spec, world))
        for device in reader.plan.devices:
            wanted = list(reader.wanted_by(device))
            before = bytes_asked_of_the_system()
            count = read_slices(checkpoint, wanted)
            asked = bytes_asked_of_the_system() - before
            slices = [each for each, _ in wanted]
            share = 4 * sum(each.num_elements for each in slices)
            assert count.headers == (checkpoint.folder / "manifest.json").stat().st_size
            assert count.tensors == blocks_touched(checkpoint, slices)
            assert count.tensors <= asked < count.tensors + 1000  # /proc/self/io itself is read too
            if is_same:
                assert count.tensors == share
            if world == "2+2+1":
                assert share <= count.tensors < share + 2 * BLOCK_BYTES * len(slices)


def test_a_part_is_a_file_of_safetensors_with_matrices_column_by_column(tmp_path: Path) -> None:
    spec = models.model_spec("llama")
    state = random_state(spec)
    checkpoint = Job.of(spec, plan_of(spec, "2"), state=state).save(tmp_path)
    found = load_file(checkpoint.folder / "rank-1.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(found[f"{name}/exp_avg/0:48/176:352"], state["exp_avg"][name][:, 176:].t())
    part = checkpoint.manifest.parts[1]
    assert (part.file, part.num_bytes) == ("rank-1.safetensors", (checkpoint.folder / part.file).stat().st_size)
    assert len(found) == len(part.tensors)


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
        last = max(stored.offset + stored.num_bytes for stored in part.tensors) - 1
        assert last == file.stat().st_size - 1
        for place in (first, last, *(chance.randrange(first, last) for _ in range(3))):
            flip(file, place)
            with pytest.raises(CheckpointRefused, match=rf"{file}: is damaged: .* in [\w.]+ \(.*\), have the checksum"):
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
    each, tensor = Slice("a", "value", (0, 2), (0, 3)), torch.arange(6.0).view(3, 2).t()
    copy = copy_slices([(each, tensor)])
    tensor.zero_()
    assert torch.equal(copy.tensors[0], torch.arange(6.0).view(3, 2).t())
    with pytest.raises(CheckpointError, match=r"has shape \(2, 3\), found a tensor of shape \(3, 2\)"):
        copy_slices([(each, tensor.t())])


class Held(torch.Tensor):
    """A tensor of a disk that is slow: it is written once `gate` opens."""

    gate = threading.Event()

    def t(self) -> torch.Tensor:
        self.gate.wait(10)
        return self.as_subclass(torch.Tensor).t()


def test_a_part_is_written_beside_the_job_one_at_a_time(tmp_path: Path) -> None:
    copy = HostCopy((Slice("a", "value", (0, 2), (0, 3)),), (torch.ones(2, 3).as_subclass(Held),))
    writer = Writer()
    assert writer.poll() is writer.wait(0) is None
    writer.submit(copy, tmp_path / "rank-0.safetensors")
    assert writer.is_busy
    assert writer.poll() is None
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors: another part is still being written"):
        writer.submit(copy, tmp_path / "rank-1.safetensors")
    with pytest.raises(CheckpointError, match=r"not written within 0\.01 s"):
        writer.wait(0.01)
    Held.gate.set()
    part = writer.wait(60)
    assert part.num_bytes == (tmp_path / part.file).stat().st_size
    assert not writer.is_busy
    assert writer.poll() is None


def test_what_the_disk_refuses_is_told_with_the_file(tmp_path: Path) -> None:
    copy = copy_slices([(Slice("a", "value", (0, 2), (0, 3)), torch.ones(2, 3))])
    writer = Writer()
    for file, reason in ((tmp_path / "none" / "f", "No such file or directory"), (tmp_path, "File exists")):
        writer.submit(copy, file)
        with pytest.raises(CheckpointError, match=f"{file}: can't write the checkpoint: {reason}"):
            writer.wait(60)
    writer.submit(copy, tmp_path / "f")
    assert writer.wait(60).file == "f"


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
