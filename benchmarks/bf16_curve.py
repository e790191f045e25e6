"""Does a bf16 run on uneven replicas follow one device? Loss curves of 200 steps, side by side.

    .venv/bin/python benchmarks/bf16_curve.py

Trains the same tiny model on the same batches, on 3 devices as 2 + 1 and on one, and writes the picture for the docs
and the numbers to `benchmarks/results/bf16_curve.md`. fp64 runs agree to 1e-12; what differs here is rounding alone,
since another split of a sum rounds otherwise. Another micro-batch on one device is another split too: the yardstick.
"""

import json
import platform
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from uneven.draw import draw_loss

ROOT = Path(__file__).parent.parent
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 64,
}
STEPS = 200
UNEVEN, ONE, CONTROL = "2 + 1 devices", "one device", "one device, other micro-batch"
RUNS = {UNEVEN: ("2,1", 2), ONE: ("1", 2), CONTROL: ("1", 3)}
"""Replicas and micro-batch: the control shows how far rounding alone takes one device from itself."""


@dataclass(frozen=True)
class Difference:
    """Between two loss curves, in nats per token: at the worst step, on average, and of the held-out loss."""

    largest: float
    mean: float
    heldout: float


def arguments(run: str, folder: Path) -> list[str]:
    """Of the command line for one of RUNS, into a folder of `folder` (see `out`)."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    replicas, micro_batch = RUNS[run]
    values = {
        "model": f'"{folder / "model.json"}"',
        "data.paths": f'["{sysconfig.get_paths()["stdlib"]}/asyncio"]',
        "data.cache": f'"{folder / "cache"}"',
        "data.restart_at_documents": "false",
        "train.steps": STEPS,
        "train.seq_len": 32,
        "train.global_batch": 6,
        "train.micro_batch": micro_batch,
        "train.lr": 2e-3,
        "train.min_lr": 2e-4,
        "train.warmup_steps": 40,
        "train.precision": '"bf16"',
        "eval.reload": "false",
        "sample.tokens": 0,
    }
    pairs = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return ["train", "--replicas", replicas, "--out", str(out(run, folder)), *pairs]


def out(run: str, folder: Path) -> Path:
    return folder / f"run-{list(RUNS).index(run)}"


def curve(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def compare(found: Path, needed: Path) -> Difference:
    """How far apart two runs are."""
    pairs = zip(curve(found), curve(needed), strict=True)
    gaps = [abs(a - b) for (_, a), (_, b) in pairs]
    assert len(gaps) == STEPS
    heldout = [json.loads((run / "summary.json").read_text())["heldout_loss"] for run in (found, needed)]
    return Difference(max(gaps), sum(gaps) / len(gaps), abs(heldout[0] - heldout[1]))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run in RUNS:
            command = [sys.executable, "-m", "uneven", *arguments(run, folder)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        uneven, control = (compare(out(run, folder), out(ONE, folder)) for run in (UNEVEN, CONTROL))
        curves = {f"{run}, bf16": curve(out(run, folder)) for run in (UNEVEN, ONE)}
    draw_loss(ROOT / "docs/images/bf16-curve.png", curves=curves, references={})
    first, last = (next(iter(curves.values()))[i][1] for i in (0, -1))
    lines = [
        "# bf16 on 2 + 1 devices against one device",
        "",
        f"{STEPS} steps of a Llama of {MODEL['hidden_size']} channels and {MODEL['num_hidden_layers']} layers on the "
        f"same batches; loss {first:.2f} to {last:.2f} nats/token.",
        "",
        "| difference from one device, nats/token | 2 + 1 devices | one device, micro-batch 3 instead of 2 |",
        "|---|---|---|",
        f"| at the worst step | {uneven.largest:.4f} | {control.largest:.4f} |",
        f"| mean over the steps | {uneven.mean:.4f} | {control.mean:.4f} |",
        f"| held-out loss | {uneven.heldout:.4f} | {control.heldout:.4f} |",
        "",
        "![loss curves](../../docs/images/bf16-curve.png)",
        "",
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()} CPU with gloo; "
        "`.venv/bin/python benchmarks/bf16_curve.py`",
    ]
    (ROOT / "benchmarks/results/bf16_curve.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
