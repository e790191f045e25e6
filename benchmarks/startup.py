"""How long a job takes from the command to its first finished step, beside torchrun.

    .venv/bin/python -m benchmarks.startup --write

`uneven train --replicas 2,1` on its built-in model takes turns with `torchrun --nproc-per-node 3` of a script that
does what it must: import torch and transformers, build the same model, wrap it in DistributedDataParallel over gloo,
and take one step on a batch of the same size. Both times end when the first step is done: with the line in the run's
metrics, and with a file that the script's first rank writes. The data is cached, and so are the files of Python.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.report import parse_arguments, publish, ratio, spread, surroundings, verdict
from uneven.modelspec import DEFAULT_MODEL

NUM_RANKS = 3
AT_MOST = 1.0
REPETITIONS = 7
QUICK_CORPUS = f'["{sysconfig.get_paths()["stdlib"]}/asyncio"]'

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

config, sequences, done = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.float32)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, foreach=True)
tokens = torch.randint(model.config.vocab_size, (sequences, 129))
parallel(input_ids=tokens[:, :-1], labels=tokens[:, :-1], use_cache=False).loss.backward()
torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
optimizer.step()
dist.barrier()
if dist.get_rank() == 0:
    open(done, "w").write("step 1")
dist.destroy_process_group()
"""


def timed(command: Sequence[str], done: Path, *, folder: Path) -> float:
    """Seconds from the start of a command until it wrote `done`, by the file's own time."""
    began = time.time()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return done.stat().st_mtime - began


def uneven_s(folder: Path, *, name: str, is_quick: bool) -> float:
    """One step, so that the last write to the metrics is the first step's."""
    settings = {"train.steps": "1", "eval.sequences": "1", "eval.reload": "false", "sample.tokens": "0"}
    if is_quick:
        settings |= {"data.paths": QUICK_CORPUS, "data.cache": '"cache"'}
    pairs = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "uneven", "train", "--replicas", "2,1", "--out", name, *pairs]
    return timed(command, folder / name / "metrics.jsonl", folder=folder)


def torchrun_s(folder: Path, *, name: str, is_quick: bool) -> float:
    """The script is the same for a quick run, which only shortens the reading of data."""
    (folder / "plain.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    command = [*torchrun, "plain.py", str(DEFAULT_MODEL), str(9 // NUM_RANKS), name]
    return timed(command, folder / name, folder=folder)


def measure(*, is_quick: bool) -> dict[str, list[float]]:
    """Seconds by launcher, one a repetition; they take turns, after one that fills caches."""
    numbers = range(1) if is_quick else range(-1, REPETITIONS)
    launchers: dict[str, Callable[..., float]] = {"uneven": uneven_s, "torchrun": torchrun_s}
    times: dict[str, list[float]] = {launcher: [] for launcher in launchers}
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            for launcher in list(launchers)[:: 1 if number % 2 else -1]:
                seconds = launchers[launcher](Path(folder), name=f"{launcher}-{number}", is_quick=is_quick)
                if number >= 0:
                    times[launcher].append(seconds)
    return times


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    options = parse_arguments(__doc__, argv)
    load_before = os.getloadavg()[0]
    times = measure(is_quick=options.quick)
    found = ratio(times["uneven"], times["torchrun"])
    lines = [
        "# From the command to the first step",
        "",
        f"`uneven train --replicas 2,1` and `torchrun --nproc-per-node {NUM_RANKS}` of a minimal script with the same "
        f"model and batch, {len(times['uneven'])} repetitions in turn.",
        "",
        "| | uneven / torchrun | target |",
        "|---|---|---|",
        f"| seconds to the first finished step | {found} | {verdict(found.median, at_most=AT_MOST)} |",
        "",
        f"In this run it took uneven {spread(times['uneven'])} s and torchrun {spread(times['torchrun'])} s. torchrun "
        "starts a fresh interpreter for each rank, and each imports torch; ranks of uneven are forks of one process "
        "that has imported it. The script reads no data; `uneven` also checks its cached data, draws the plan and "
        "writes a run's folder.",
        "",
        surroundings("startup", load_before=load_before),
    ]
    publish("startup", lines, raw=times, options=options)
    return times


if __name__ == "__main__":
    main()
