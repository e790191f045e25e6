"""One job on several hosts: by `uneven launch`, torchrun and Slurm's variables, all with real processes."""

import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import uneven
from tests.e2e.command import TinyJob, uneven_here
from tests.e2e.hosts import UNEVEN, Command, OtherNetwork, finish, other_networks, run, slurm, started

HERE = socket.gethostname()
ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/howto/several-machines.md"
EXACT = {"train__precision": "fp64", "train__schedule": "constant", "launch__threads": 1}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def documented(command: str) -> list[list[str]]:
    """The page's lines that start with a command, as words."""
    lines = (ROOT / PAGE).read_text().splitlines()
    return [shlex.split(line) for line in lines if line.startswith(command)]


def host_flags(endpoint: str) -> list[str]:
    return ["launch", "--nnodes", "2", "--rdzv-endpoint", endpoint]


@pytest.fixture(scope="module")
def job(tiny_files: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyJob:
    """A folder for all runs of this page."""
    return TinyJob(tiny_files, tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="module")
def network() -> Iterator[OtherNetwork]:
    with ExitStack() as stack:
        try:
            (found,) = stack.enter_context(other_networks(1))
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"another network can't be made here, which takes root and ip: {error}")
        yield found


def await_steps(folder: Path, count: int, *, running: Sequence[Command]) -> None:
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= count):
        assert all(each.process.poll() is None for each in running)
        time.sleep(0.05)


def assert_same_run(job: TinyJob, found: str, needed: str) -> None:
    """The same numbers and weights, bit for bit."""
    for a, b in zip(job.metrics(found), job.metrics(needed), strict=True):
        assert (a["loss"], a["grad_norm"]) == (b["loss"], b["grad_norm"])
    weights = [(job.folder / out / "model/model.safetensors").read_bytes() for out in (found, needed)]
    assert weights[0] == weights[1]
    assert job.summary(found)["heldout_loss"] == job.summary(needed)["heldout_loss"]


@pytest.fixture(scope="module")
def reference(job: TinyJob) -> str:
    """A run of 1 + 1 devices on one host."""
    result = job.train("--replicas", "1,1", out="reference", **EXACT)
    assert result.returncode == 0, result.stderr
    return "reference"


# The same job


def test_two_hosts_follow_one(job: TinyJob, reference: str, network: OtherNetwork) -> None:
    """By the page's two commands, each in a network of its own, with one rank."""
    first, second = ([word.replace("node01", network.near) for word in line] for line in documented("uneven launch"))
    there = [*UNEVEN, *second[1:], "--out", "there", *job.settings(**EXACT)]
    with started([network.inside(there)], cwd=job.folder) as running:
        here = uneven_here(*first[1:], "--out", "here", *job.settings(**EXACT), cwd=job.folder)
        (other,) = finish(running)
    assert (here.returncode, other.code) == (0, 0), here.stderr + other.errors
    assert_same_run(job, "here", reference)
    assert "held-out loss" in here.stdout
    assert other.output.splitlines() == [f"host 1 of 2, meeting at {network.near}, port 29400 to 29407"]
    written = [path.relative_to(job.folder).as_posix() for path in (job.folder / "there").rglob("*")]
    # Without a folder that they share no checkpoint can become whole: each host has its ranks' parts.
    part = "there/checkpoints/.step-00000004.generation-0/rank-1.safetensors"
    assert sorted(written) == [
        *("there/checkpoints", "there/checkpoints/.step-00000004.generation-0", part),
        *("there/logs", "there/logs/rank-1.log"),
    ]
    assert "can't be published" in here.stdout


def test_torchrun_follows_one_launcher(job: TinyJob) -> None:
    """The page's command: three processes, of which each is a rank."""
    result = job.train("--replicas", "2,1", out="launcher", **EXACT)
    assert result.returncode == 0, result.stderr
    command = [str(Path(sys.executable).parent / "torchrun"), *documented("torchrun")[0][1:]]
    (done,) = run([[*command, "--out", "torchrun", *job.settings(**EXACT)]], cwd=job.folder)
    assert done.code == 0, done.errors
    assert_same_run(job, "torchrun", "launcher")
    assert done.output.count("held-out loss") == 1
    assert not (job.folder / "torchrun/logs").exists()


def test_tasks_of_slurm_follow_one_launcher_and_stop_on_ctrl_c(job: TinyJob, reference: str) -> None:
    """Two tasks, a replica since they are on one host; a stranger at the port that the job's number stands for."""
    command = [*UNEVEN, "train", "--out", "slurm", *job.settings(**EXACT | {"train__steps": 100_000})]
    environments = [slurm(i, 2, job=77, node=HERE) for i in range(2)]
    with (
        socket.create_server(("", 15000 + 16 * 77)),
        started([command] * 2, cwd=job.folder, environments=environments) as running,
    ):
        await_steps(job.folder / "slurm", 4, running=running)
        running[1].process.send_signal(signal.SIGINT)
        first, second = finish(running)
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    found, needed = ([line["loss"] for line in job.metrics(out)][:4] for out in ("slurm", reference))
    np.testing.assert_allclose(found, needed, rtol=1e-12)
    assert json.loads((job.folder / "slurm/config.json").read_text())["parallel"]["replicas"] == [2]
    assert job.summary("slurm")["stopped_early"]
    assert (job.folder / "slurm/model/model.safetensors").is_file()
    assert "stopped early" in first.output
    assert (second.output, second.errors) == ("", "")


# Refusals, which need no torch


def refused(commands: Sequence[Sequence[str]], *, cwd: Path, **more: object) -> list[str]:
    """What commands say that all end with code 2."""
    ended = run(commands, cwd=cwd, **more)
    assert [each.code for each in ended] == [2] * len(ended), [each.errors for each in ended]
    return [each.errors for each in ended]


def both(job: TinyJob, *, first: Sequence[str] = (), second: Sequence[str] = ()) -> list[list[str]]:
    """The same job on two hosts of this machine, but for some arguments."""
    place = [*UNEVEN, *host_flags(f"127.0.0.1:{free_port()}")]
    return [
        [*place, "--node-rank", str(i), "train", *job.settings(), *more, "--out", "refused"]
        for i, more in enumerate((first, second))
    ]


def test_other_settings_and_plans_are_refused_by_name(job: TinyJob) -> None:
    commands = both(job, second=["--set", "train.lr=0.5", "--shares", "1:3"], first=["--shares", "1:1"])
    for text in refused(commands, cwd=job.folder):
        assert text.startswith("error: hosts differ in what must be the same:\n")
        assert f"train.lr: 0.006 on host 0 ({HERE}), 0.5 on host 1 ({HERE})" in text
        assert "plan: 2 devices, digest " in text
    assert not (job.folder / "refused").exists()


def test_another_tokenizer_is_refused_by_name(job: TinyJob) -> None:
    model = {"type": "WordLevel", "vocab": {f"w{n}": n for n in range(9)}, "unk_token": "w0"}
    (job.folder / "nine.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    for text in refused(both(job, second=["--set", "tokenizer=nine.json"]), cwd=job.folder):
        assert "tokenizer: 257 tokens, digest " in text
        assert f"on host 0 ({HERE}), 9 tokens, digest " in text


def test_other_data_are_refused_by_name_between_slurms_tasks_too(job: TinyJob) -> None:
    shutil.copytree(job.files / "corpus", job.folder / "longer")
    (job.folder / "longer/more.txt").write_text("more")
    commands = [
        [*UNEVEN, "train", "--replicas", "2", "--out", "refused", *job.settings(), *more]
        for more in ((), ("--set", "data.paths=longer"))
    ]
    environments = [slurm(i, 2, job=78, node="localhost") for i in range(2)]
    for text in refused(commands, cwd=job.folder, environments=environments):
        assert text.startswith("error: ranks differ in what must be the same:\n")
        assert "corpus: 40 documents, " in text
        assert f" on rank 0 ({HERE}), 41 documents, " in text
    assert not (job.folder / "refused").exists()


def test_other_code_is_refused(job: TinyJob) -> None:
    copy = job.folder / "other/uneven"
    shutil.copytree(Path(uneven.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "errors.py").open("a") as file:
        file.write("# one comment more\n")
    environments = [{}, {"PYTHONPATH": str(copy.parent)}]
    for text in refused(both(job), cwd=job.folder, environments=environments):
        assert "source code of uneven: digest " in text
        assert "version of" not in text


def test_a_mistake_of_one_host_ends_both(job: TinyJob) -> None:
    first, second = refused(both(job, second=["--set", "tokenizer=nowhere.json"]), cwd=job.folder)
    assert "nowhere.json" in second
    assert first == second.replace("error: ", f"error: host 1 ({HERE}): ")


def test_a_plan_for_other_processes_is_refused_on_each(job: TinyJob) -> None:
    command = [*UNEVEN, "train", "--replicas", "2,1", "--out", "refused", *job.settings()]
    environments = [slurm(i, 2, job=79, node="localhost") for i in range(2)]
    texts = refused([command] * 2, cwd=job.folder, environments=environments)
    assert all("the plan has 3 devices, but 2 processes were started" in text for text in texts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nnodes", "2"], "--rdzv-endpoint must say where the others find host 0"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a"], "--node-rank is 2, but --nnodes is 2"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:b"], "--rdzv-endpoint a:b: expected a host and a port"),
        (["--nnodes", "2", "--rdzv-endpoint", "192.0.2.77"], "192.0.2.77, which is no address of this host"),
    ],
)
def test_places_that_can_not_be_are_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    (text,) = refused([[*UNEVEN, "launch", *flags, "train"]], cwd=tmp_path)
    assert message in text
