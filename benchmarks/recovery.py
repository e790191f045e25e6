"""How long a job stands still when one of its three processes is killed, and what it trains over three such faults.

    .venv/bin/python -m benchmarks.recovery --write

`uneven train --replicas 2,1` takes turns with torchrun that restarts from its last checkpoint, and with torchft, whose
replica is dropped and healed; model, batch and thread count are the same. A process is killed from outside at the same
steps, and comes back as each system has it. All are watched alike: by the lines of their committed steps.
What a replica of 8 loses beside the eighth part is measured in `one_of_eight`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import final

import torch
import transformers

from benchmarks import one_of_eight
from benchmarks.recovery_peers import STEPS_PER_CHECKPOINT
from benchmarks.report import parse_arguments, publish, spread, surroundings, verdict
from uneven.elastic.inbox import Request, put
from uneven.modelspec import DEFAULT_MODEL

NUM_RANKS, SEQUENCES, VICTIM = 3, 9, 1
POLL_S = 0.003
PATIENCE_S = 300.0
"""Without a committed step."""
TORCHFT = "torchft==0.2.0"
LIGHTHOUSE = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
"""As torchft's README starts it."""
VENV = Path.home() / ".cache" / "uneven-benchmarks" / TORCHFT.replace("==", "-")
QUICK_CORPUS = f'["{sysconfig.get_paths()["stdlib"]}/asyncio"]'


@dataclass(frozen=True, slots=True)
class Form:
    """The steps of a run, after which of them a process is killed, and how many runs each system has."""

    steps: int
    kills: tuple[int, ...]
    rounds: int
    is_quick: bool = False


LONG = Form(steps=350, kills=(50, 150, 250), rounds=1)
QUICK = Form(steps=30, kills=(10,), rounds=1, is_quick=True)


@dataclass(slots=True)
class Run:
    """What was seen: the time of each step's first commit, committed tokens, and the moments of the kills."""

    commits: list[tuple[float, int, int]] = field(default_factory=list)
    kills: list[tuple[float, int]] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.commits[-1][1] if self.commits else 0

    @property
    def recovery_s(self) -> list[float]:
        """From each kill to the first commit of a step that had not been committed."""
        return [next(at for at, step, _ in self.commits if step > last) - killed for killed, last in self.kills]

    @property
    def tokens_per_s(self) -> float:
        return sum(tokens for _, _, tokens in self.commits[1:]) / (self.commits[-1][0] - self.commits[0][0])

    @property
    def step_s(self) -> float:
        """Of an undisturbed step: before the first kill."""
        times = [at for at, step, _ in self.commits if step <= self.kills[0][1]]
        return median(after - before for before, after in pairwise(times))


def processes_in(folder: Path) -> list[int]:
    """Processes that work in a folder: torchrun's have sessions of their own, and outlive it."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").resolve() == folder.resolve():
                found.append(int(entry.name))
    return found


class System(ABC):
    """A way to train that survives a kill, in a folder of its own; as a context it ends all of its processes."""

    name: str

    def __init__(self, folder: Path, form: Form) -> None:
        self.folder = folder
        self.form = form
        self._processes: list[subprocess.Popen[bytes]] = []
        self._read: dict[Path, int] = {}
        folder.mkdir()

    def __enter__(self) -> "System":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Those that started others first, so that none is started again.
        for process in self._processes:
            process.kill()
            process.wait()
        for pid in processes_in(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def spawn(self, name: str, command: Sequence[str], **environment: str) -> None:
        with (self.folder / f"{name}.txt").open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    @property
    def is_running(self) -> bool:
        return self._processes[-1].poll() is None

    def commits(self) -> list[tuple[int, int]]:
        """Steps and their tokens, told of since the last time."""
        found = []
        for path in self.folder.glob(self.pattern):
            with path.open() as lines:
                lines.seek(self._read.get(path, 0))
                for line in lines:
                    if not line.endswith("\n"):
                        break
                    self._read[path] = self._read.get(path, 0) + len(line.encode())
                    record = json.loads(line)
                    found.append((record["step"], record["tokens"]))
        return sorted(found)

    pattern = "commits-*.jsonl"

    @abstractmethod
    def start(self) -> None:
        """Start all processes."""

    def victim(self) -> int | None:
        """The process that is killed, if it takes part."""
        path = self.folder / f"pid-{VICTIM}"
        return int(path.read_text() or 0) or None if path.exists() else None

    def revive(self) -> None:
        """Let the victim come back; here, others see to that."""
        return

    def peer(self, python: Path, *options: str) -> list[str]:
        """The command of a peer's processes."""
        script = Path(__file__).with_name("recovery_peers.py")
        share = str(SEQUENCES // NUM_RANKS)
        run = [str(python), "-m", "torch.distributed.run", "--max-restarts=20", *options, str(script), self.name]
        return [*run, str(DEFAULT_MODEL), str(self.folder), share, str(self.form.steps)]


@final
class Uneven(System):
    """Goes on with two devices; the third joins as soon as it has been asked to, after the recovery."""

    name = "uneven"
    pattern = "run/metrics.jsonl"

    def start(self) -> None:
        settings = {
            "train.steps": str(self.form.steps),
            "train.global_batch": str(SEQUENCES),
            "launch.threads": "1",
            "eval.sequences": "1",
            "eval.reload": "false",
            "sample.tokens": "0",
        }
        if self.form.is_quick:
            settings |= {"data.paths": QUICK_CORPUS, "data.cache": '"cache"'}
        pairs = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self.spawn("uneven", [sys.executable, "-m", "uneven", "train", "--replicas", "2,1", "--out", "run", *pairs])

    def victim(self) -> int | None:
        devices = json.loads((self.folder / "run" / "devices.json").read_text())
        return next((each["pid"] for each in devices if (each["id"], each["state"]) == (VICTIM, "healthy")), None)

    def revive(self) -> None:
        put(self.folder / "run", Request("join", VICTIM))


@final
class Torchrun(System):
    """Ends and restarts all processes."""

    name = "torchrun"

    def start(self) -> None:
        options = ("--standalone", f"--nproc-per-node={NUM_RANKS}")
        # Without this the processes of a restart find the addresses of those before in the store, and fail.
        self.spawn("torchrun", self.peer(Path(sys.executable), *options), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


@final
class Torchft(System):
    """A lighthouse, and three replicas of one process each, which their own torchrun restarts."""

    name = "torchft"

    def start(self) -> None:
        ports = free_ports(1 + NUM_RANKS)
        self.spawn("lighthouse", [str(VENV / "bin/torchft_lighthouse"), "--bind", f"127.0.0.1:{ports[0]}", *LIGHTHOUSE])
        for rank in range(NUM_RANKS):
            options = (f"--master-port={ports[1 + rank]}", "--nnodes=1", "--nproc-per-node=1")
            environment = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{ports[0]}", "REPLICA_GROUP_ID": str(rank)}
            self.spawn(f"replica-{rank}", self.peer(VENV / "bin/python", *options), **environment)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def install_torchft() -> str:
    """Make its environment if there is none; why there can't be one, or ""."""
    if (VENV / "bin/torchft_lighthouse").exists():
        return ""
    pip = [str(VENV / "bin/python"), "-m", "pip", "install", "--quiet"]
    wanted = [TORCHFT, f"torch=={torch.__version__}", f"transformers=={transformers.__version__}"]
    for command in ([sys.executable, "-m", "venv", str(VENV)], [*pip, *wanted]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"{TORCHFT} could not be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    return ""


def watch(system: System) -> Run:
    """Train to the end, and kill the victim when it is time. Raises RuntimeError if nothing is committed any more."""
    run, told, kills = Run(), time.monotonic(), list(system.form.kills)
    killed: set[int] = set()
    is_revived = True
    with system:
        while run.last < system.form.steps:
            found = [(step, tokens) for step, tokens in system.commits() if step > run.last]
            now = time.monotonic()
            # Three replicas may tell of the same step; it counts once.
            run.commits += [(now, step, tokens) for step, tokens in dict(found).items()]
            told = now if found else told
            if found and not is_revived:
                is_revived = True
                system.revive()
            pid = system.victim() if found and kills and run.last >= kills[0] else None
            if pid is not None and pid not in killed:
                killed.add(pid)
                kills.pop(0)
                is_revived = False
                run.kills.append((time.monotonic(), run.last))
                os.kill(pid, signal.SIGKILL)
            if now - told > PATIENCE_S or not (found or system.is_running):
                text = "".join(path.read_text()[-2000:] for path in system.folder.glob("*.txt"))
                raise RuntimeError(f"{system.name} stopped after step {run.last} of {system.form.steps}:\n{text}")
            time.sleep(POLL_S)
    if kills:
        raise RuntimeError(f"{system.name}: nobody came back to be killed after steps {kills}")
    return run


def measure(form: Form, systems: Sequence[type[System]]) -> dict[str, list[Run]]:
    """The runs of each system; they take turns."""
    runs: dict[str, list[Run]] = {system.name: [] for system in systems}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(form.rounds):
            for system in systems[:: 1 if number % 2 == 0 else -1]:
                run = watch(system(Path(folder) / f"{system.name}-{number}", form))
                runs[system.name].append(run)
                print(
                    f"{system.name}: {[round(each, 2) for each in run.recovery_s]} s, {run.tokens_per_s:.0f} tokens/s"
                )
    return runs


def page(form: Form, runs: dict[str, list[Run]], *, why_not: str) -> list[str]:
    recovery = {name: spread([each for run in of for each in run.recovery_s]) for name, of in runs.items()}
    tokens = {name: spread([run.tokens_per_s for run in of]) for name, of in runs.items()}
    step_s = median(run.step_s for run in runs["uneven"])
    found = recovery["uneven"]
    lines = [
        "# What a killed process costs",
        "",
        f"The built-in model on {NUM_RANKS} processes of one thread, {SEQUENCES} sequences of 128 tokens a step. A "
        f"process is killed from outside after the steps {', '.join(map(str, form.kills))} of {form.steps}, or when it "
        f"has come back from the kill before; {form.rounds} runs of each system in turn.",
        "",
        "| | seconds from a kill to the next committed step | tokens committed a second, over the run |",
        "|---|---|---|",
        *(f"| {name} | {recovery[name]} | {tokens[name]} |" for name in runs),
        "",
        "| uneven | found | target |",
        "|---|---|---|",
        f"| seconds from a kill to the next committed step, of which {step_s:.2f} are a step | {found.median:.2f} | "
        f"{verdict(found.median, at_most=round(2 + step_s, 2))} |",
    ]
    for name, target in (("torchrun", 0.2), ("torchft", 1.0)):
        if name in runs:
            part = found.median / recovery[name].median
            lines.append(f"| over that of {name} | {part:.3f} | {verdict(part, at_most=target)} |")
    return [
        *lines,
        "",
        "uneven has 2 + 1 devices: the replica of two goes on with one, and the device joins again as soon as it may. "
        f"torchrun starts all processes anew, which load a checkpoint of each {STEPS_PER_CHECKPOINT} steps: the steps "
        "since then are done again, and count once. "
        + (
            f"torchft is not compared: {why_not}."
            if why_not
            else f"{TORCHFT} has three replicas, its defaults, and a lighthouse with `{' '.join(LIGHTHOUSE)}`, as its "
            "README says; without a replica it goes on with a smaller batch. Its torchrun restarts the replica."
        ),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, list[Run]]:
    options = parse_arguments(__doc__, argv)
    load_before = os.getloadavg()[0]
    form = QUICK if options.quick else LONG
    why_not = "a quick run leaves it out" if options.quick else install_torchft()
    runs = measure(form, [Uneven, Torchrun] if why_not else [Uneven, Torchrun, Torchft])
    lines = page(form, runs, why_not=why_not)
    devices = one_of_eight.measure(is_quick=options.quick)
    lines += ["", *one_of_eight.page(devices), "", surroundings("recovery", load_before=load_before)]
    raw = {
        "runs": {name: [asdict(run) for run in of] for name, of in runs.items()},
        "one_of_eight": [asdict(each) for each in devices],
    }
    publish("recovery", lines, raw=raw, options=options)
    return runs


if __name__ == "__main__":
    main()
