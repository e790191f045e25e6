"""Training on a CUDA device by the code path of the CPU."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.e2e.command import TinyJob, load, write_tiny_files
from uneven.checkpoint.folder import Checkpoint
from uneven.checkpoint.restore import read_tiles
from uneven.checkpoint.write import copy_tiles, write_part
from uneven.reshard import Tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"),
]


def losses(tiny: TinyJob, out: str) -> list[float]:
    return [line["loss"] for line in tiny.metrics(out)]


def test_one_gpu_follows_the_cpu_in_fp64(tmp_path: Path) -> None:
    write_tiny_files(tmp_path / "files")
    tiny = TinyJob(tmp_path / "files", tmp_path)
    for device in ("cpu", "cuda"):
        result = tiny.train("--replicas", "1", "--device", device, out=device, train__precision="fp64")
        assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(losses(tiny, "cuda"), losses(tiny, "cpu"), rtol=1e-10)


def test_three_ranks_that_share_a_gpu_by_gloo_follow_one(tmp_path: Path) -> None:
    """With sums, and with the point to point that gathers the model, which gloo has for the CPU alone."""
    write_tiny_files(tmp_path / "files")
    tiny = TinyJob(tmp_path / "files", tmp_path)
    for out, replicas, backend in (("one", "1", "auto"), ("three", "2,1", "gloo")):
        flags = ("--replicas", replicas, "--device", "cuda")
        result = tiny.train(*flags, out=out, train__precision="fp64", launch__backend=backend)
        assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(losses(tiny, "three"), losses(tiny, "one"), rtol=1e-10)
    one, three = (load(tmp_path / out / "model") for out in ("one", "three"))
    for (name, a), (_, b) in zip(three.named_parameters(), one.named_parameters(), strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-8, name


@pytest.mark.skipif(torch.cuda.device_count() > 2, reason="needs fewer than 3 GPUs")
def test_nccl_does_not_share_a_gpu(tmp_path: Path) -> None:
    write_tiny_files(tmp_path / "files")
    tiny = TinyJob(tmp_path / "files", tmp_path)
    result = tiny.train("--replicas", "2,1", "--device", "cuda")
    assert result.returncode == 2
    assert "3 devices" in result.stderr
    assert "launch.backend = 'gloo'" in result.stderr


def test_a_checkpoint_of_a_gpu_is_that_of_the_cpu(tmp_path: Path) -> None:
    """Copied into pinned memory, from views, and changed right after; read into views there."""
    wholes = [torch.randn(300, 140, device="cuda"), torch.randn(5000, device="cuda")]
    tiles = {"a": (Tile(70, 140, 1, wholes[0][:, 70:]),), "b": (Tile(0, 5000, 0, wholes[1]),)}
    needed = [whole.cpu() for whole in wholes]
    copy = copy_tiles([("value", tiles)], {"a": ((70, 140),), "b": ((0, 5000),)})
    wholes[0][:, 70:].zero_()
    wholes[1].zero_()
    assert all(tensor.is_pinned() for _, tensor in copy)
    part = write_part(copy, tmp_path / "rank-0.safetensors")
    read_tiles(Checkpoint(tmp_path, SimpleNamespace(parts=(part,))), [("value", tiles)])
    for whole, value in zip(wholes, needed, strict=True):
        assert torch.equal(whole.cpu(), value)
