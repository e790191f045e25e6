"""Training on a CUDA device by the code path of the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.command import TinyJob, write_tiny_files

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"),
]


def test_one_gpu_follows_the_cpu_in_fp64(tmp_path: Path) -> None:
    write_tiny_files(tmp_path / "files")
    tiny = TinyJob(tmp_path / "files", tmp_path)
    for device in ("cpu", "cuda"):
        result = tiny.train("--replicas", "1", "--device", device, out=device, train__precision="fp64")
        assert result.returncode == 0, result.stderr
    cpu, cuda = ([line["loss"] for line in tiny.metrics(out)] for out in ("cpu", "cuda"))
    np.testing.assert_allclose(cuda, cpu, rtol=1e-10)
