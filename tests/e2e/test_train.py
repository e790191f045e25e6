"""Training from the command line: what it leaves behind, how it ends, and that divisions don't change the result."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.e2e.command import TinyJob, load, uneven_here
from uneven.layout import ParallelPlan, Partition, ReplicaPlan
from uneven.layout.model import ModelLayout
from uneven.modelspec import read_model

FILES = {
    "checkpoints",
    "config.json",
    "data.json",
    "devices.json",
    "events.jsonl",
    "goodput.jsonl",
    "logs",
    "loss.png",
    "metrics.jsonl",
    "model",
    "plan.json",
    "plan.png",
    "summary.json",
    "tokenizer",
}


def losses(tiny: TinyJob, out: str) -> list[float]:
    return [line["loss"] for line in tiny.metrics(out)]


def assert_same_curve(found: list[float], needed: list[float], *, tolerance: float) -> None:
    assert len(found) == len(needed) > 0
    np.testing.assert_allclose(found, needed, rtol=tolerance)


def test_a_run_leaves_its_files_and_a_folder_that_transformers_loads(tiny: TinyJob) -> None:
    result = tiny.train(
        *("--replicas", "2,1"),
        eval__reload=True,
        sample__tokens=5,
        log__samples=True,
        data__restart_at_documents=False,
    )
    assert result.returncode == 0, result.stderr
    folder = tiny.folder / "run"
    assert {path.name for path in folder.iterdir()} == FILES
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log", "rank-2.log"]
    summary = tiny.summary()
    assert summary["reloaded_heldout_loss"] == pytest.approx(summary["heldout_loss"], rel=1e-5)
    assert summary["sample"].startswith("def ")
    assert f"{summary['unigram_entropy']:.6f}" in result.stdout
    assert f"{summary['heldout_loss']:.6f}" in result.stdout
    model = load(folder / "model")
    assert sum(p.numel() for p in model.parameters()) == read_model(folder / "model").structure.num_parameters
    assert AutoTokenizer.from_pretrained(folder / "model")("def é").input_ids == list("def é".encode())
    assert len(json.loads((folder / "data.json").read_text())["corpus_fingerprint"]) == 64
    for step, line in enumerate(tiny.metrics(), start=1):
        assert line["step"] == step
        assert {"loss", "grad_norm", "lr", "tokens", "time_s"} < line.keys()
        assert line["tokens"] == 7 * 32
        assert line["samples"] == list(range(7 * (step - 1), 7 * step))


@pytest.mark.parametrize(
    "division", [["--replicas", "4,3"], ["--shares", "2:1:1,1:1", "--batch-shares", "4:3"], ["--replicas", "3,2,1"]]
)
def test_every_division_follows_one_device_in_fp64(tiny: TinyJob, division: list[str]) -> None:
    precision = {"train__precision": "fp64", "train__lr": 0.01, "train__warmup_steps": 1}
    assert tiny.train("--replicas", "1", out="one", **precision).returncode == 0
    result = tiny.train(*division, out="many", **precision)
    assert result.returncode == 0, result.stderr
    assert_same_curve(losses(tiny, "many"), losses(tiny, "one"), tolerance=1e-12)
    one, many = (load(tiny.folder / out / "model").requires_grad_(False) for out in ("one", "many"))
    for (name, a), (_, b) in zip(many.named_parameters(), one.named_parameters(), strict=True):
        assert a.dtype == torch.float64
        assert float((a - b).abs().max() / b.abs().max()) < 1e-10, name


def test_a_plan_file_with_unusual_owners_is_followed(tiny: TinyJob) -> None:
    structure = read_model(tiny.files / "model").structure
    owners = (3, 9)
    partitions = {
        module: Partition(tuple(owners[(unit * 5) % 2] for unit in range(axis.num_units)))
        for module, axis in structure.axes.items()
    }
    odd = ReplicaPlan(ModelLayout(structure, owners, partitions), 5)
    lone = ReplicaPlan(
        ModelLayout(structure, (4,), {m: Partition((4,) * a.num_units) for m, a in structure.axes.items()}), 2
    )
    (tiny.folder / "odd.json").write_text(ParallelPlan((odd, lone)).dumps())
    result = tiny.train("--plan", "odd.json")
    assert result.returncode == 0, result.stderr
    assert json.loads((tiny.folder / "run/plan.json").read_text()) == json.loads((tiny.folder / "odd.json").read_text())
    assert sorted(path.name for path in (tiny.folder / "run/logs").iterdir()) == [
        "rank-3.log",
        "rank-4.log",
        "rank-9.log",
    ]
    shown = uneven_here("plan", "show", "run/plan.json", cwd=tiny.folder)
    assert shown.returncode == 0, shown.stderr


def test_the_same_seed_and_layout_give_the_same_bits(tiny: TinyJob) -> None:
    for out in ("first", "second"):
        assert tiny.train("--replicas", "2,1", out=out).returncode == 0
    first, second = tiny.metrics("first"), tiny.metrics("second")
    for a, b in zip(first, second, strict=True):
        assert (a["loss"], a["grad_norm"], a["lr"]) == (b["loss"], b["grad_norm"], b["lr"])
    weights = [(tiny.folder / out / "model/model.safetensors").read_bytes() for out in ("first", "second")]
    assert weights[0] == weights[1]


def test_settings_come_from_a_file_and_flags_win(tiny: TinyJob) -> None:
    pairs = tiny.settings()[1::2]
    sections: dict[str, list[str]] = {"": []}
    for pair in pairs:
        key, _, value = pair.partition("=")
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {value}")
    text = "\n".join([*sections.pop(""), *(line for name, lines in sections.items() for line in (f"[{name}]", *lines))])
    (tiny.folder / "job.toml").write_text(text + "\n[parallel]\nreplicas = [3]\n")
    result = uneven_here(
        "train", "job.toml", "--replicas", "1,1", "--set", "train.steps=2", "--out", "run", cwd=tiny.folder
    )
    assert result.returncode == 0, result.stderr
    config = json.loads((tiny.folder / "run/config.json").read_text())
    assert config["parallel"]["replicas"] == [1, 1]
    assert config["train"]["steps"] == len(tiny.metrics()) == 2


def test_gradients_that_are_not_finite_are_skipped_then_end_the_job(tiny: TinyJob) -> None:
    result = tiny.train(
        "--replicas", "2,1", train__lr=1e30, train__warmup_steps=0, train__steps=9, train__max_nonfinite=2
    )
    assert result.returncode == 1
    assert "not finite in 2 steps in a row (train.max_nonfinite)" in result.stderr
    assert "Traceback" not in result.stderr
    assert [line["skipped"] for line in tiny.metrics()] == [False, True, True]
    assert tiny.metrics()[-1]["grad_norm"] is None
    assert tiny.summary()["skipped_steps"] == 2
    assert (tiny.folder / "run/model/model.safetensors").is_file()


def test_a_run_starts_from_the_model_that_another_one_saved(tiny: TinyJob) -> None:
    assert tiny.train("--replicas", "2,1", out="first", train__precision="fp64").returncode == 0
    saved = str(tiny.folder / "first/model")
    result = tiny.train(
        "--replicas", "3", out="next", model=saved, train__precision="fp64", train__steps=1, train__lr=1e-300
    )
    assert result.returncode == 0, result.stderr
    assert f"weights of {saved}" in " ".join(result.stdout.split())
    assert tiny.summary("next")["heldout_loss"] == pytest.approx(tiny.summary("first")["heldout_loss"], rel=1e-12)


def test_the_configuration_that_a_run_leaves_repeats_it(tiny: TinyJob) -> None:
    assert tiny.train("--replicas", "2,1", out="first").returncode == 0
    result = uneven_here("train", "first/config.json", "--out", "again", cwd=tiny.folder)
    assert result.returncode == 0, result.stderr
    assert losses(tiny, "again") == losses(tiny, "first")


def test_a_flag_of_the_division_replaces_the_division_of_the_file(tiny: TinyJob) -> None:
    (tiny.folder / "job.toml").write_text("[parallel]\nshares = [[2, 1], [1]]\nbatch_shares = [2, 1]\n")
    result = tiny.train("job.toml", "--replicas", "1")
    assert result.returncode == 0, result.stderr
    assert len(list((tiny.folder / "run/logs").iterdir())) == 1


def start(tiny: TinyJob, **overrides: object) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).parent / "uneven"), "train", "--replicas", "2,1", "--out", "run"]
    return subprocess.Popen(
        [*command, *tiny.settings(**overrides)],
        cwd=tiny.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(tiny: TinyJob, process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + 120
    metrics = tiny.folder / "run/metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of_group(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def assert_nothing_is_left(group: int) -> None:
    deadline = time.monotonic() + 10
    while processes_of_group(group):
        assert time.monotonic() < deadline, processes_of_group(group)
        time.sleep(0.05)


def test_ctrl_c_ends_cleanly_and_saves(tiny: TinyJob) -> None:
    process = start(tiny, train__steps=100_000, eval__reload=True)
    wait_for_steps(tiny, process, 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group, ranks included
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "stopped early" in output
    assert "Traceback" not in output + errors
    summary = tiny.summary()
    assert summary["stopped_early"]
    assert summary["steps"] == len(tiny.metrics())
    assert summary["reloaded_heldout_loss"] == pytest.approx(summary["heldout_loss"], rel=1e-5)
    assert_nothing_is_left(process.pid)


def test_ctrl_c_while_torch_is_loading_is_one_message(tiny: TinyJob) -> None:
    process = start(tiny, train__steps=3)
    deadline = time.monotonic() + 60
    while len(processes_of_group(process.pid)) < 3:  # the launcher, a resource tracker, and the zygote
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("Interrupted: ")
    assert "Traceback" not in errors
    assert not (tiny.folder / "run").exists()
    assert_nothing_is_left(process.pid)


def test_a_killed_rank_is_named_and_the_job_goes_on(tiny: TinyJob) -> None:
    process = start(tiny, train__steps=100_000)
    wait_for_steps(tiny, process, 2)
    ranks = {pid for pid in processes_of_group(process.pid) if rank_log_of(pid) == "rank-1.log"}
    assert len(ranks) == 1
    os.kill(ranks.pop(), signal.SIGKILL)
    wait_for_steps(tiny, process, len(tiny.metrics()) + 3)
    os.kill(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "failure of device 1" in output
    assert "SIGKILL" in output
    assert [event["kind"] for event in tiny.events()][:2] == ["failure", "recovery"]
    assert [line["step"] for line in tiny.metrics()] == list(range(1, len(tiny.metrics()) + 1))
    assert [(each["id"], each["state"]) for each in tiny.devices()] == [
        (0, "healthy"),
        (1, "failed"),
        (2, "healthy"),
    ]
    assert_nothing_is_left(process.pid)


def test_a_killed_zygote_ends_the_job_and_leaves_nothing(tiny: TinyJob) -> None:
    process = start(tiny, train__steps=100_000)
    wait_for_steps(tiny, process, 2)
    children = [pid for pid in processes_of_group(process.pid) if parent_of(pid) == process.pid]
    (zygote,) = [pid for pid in children if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(zygote, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "zygote" in errors
    assert "Traceback" not in errors
    assert_nothing_is_left(process.pid)


def test_what_fails_after_the_model_is_saved_takes_nothing_away(tiny: TinyJob) -> None:
    cache = tiny.folder / "cache"
    process = start(tiny, train__steps=100_000, eval__reload=True, data__cache=str(cache))
    wait_for_steps(tiny, process, 2)
    shutil.rmtree(cache)
    os.kill(process.pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "can't open the token file" in tiny.summary()["check_problem"]
    assert "not checked" in output
    assert (tiny.folder / "run/model/model.safetensors").is_file()
    assert (tiny.folder / "run/loss.png").is_file()


def test_names_that_look_like_markup_are_shown_as_they_are(tiny: TinyJob) -> None:
    folder = tiny.folder / "m[/b]"
    folder.mkdir(parents=True)
    (folder / "a[red].txt").write_text("some words " * 200)
    result = tiny.train(out="r[/x]", data__paths=["m[/b]/a[red].txt"], train__seq_len=16)
    assert result.returncode == 0, result.stderr
    assert "m[/b]/a[red].txt" in result.stdout
    assert "r[/x]: checkpoints, config.json" in result.stdout


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def rank_log_of(pid: int) -> str:
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).name
    except OSError:
        return ""


def test_loss_falls_below_the_unigram_entropy(tiny: TinyJob) -> None:
    result = tiny.train("--replicas", "2,1", train__steps=60, train__lr=0.01)
    assert result.returncode == 0, result.stderr
    summary = tiny.summary()
    assert math.isfinite(summary["heldout_loss"])
    assert summary["heldout_loss"] < 0.7 * summary["unigram_entropy"]
