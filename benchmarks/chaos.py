"""Faults at random: kills, hangs, drains and returns, drawn by a seed, and what must hold after each job.

    .venv/bin/python -m benchmarks.chaos --write

Each job is `uneven train` of a tiny model in float64 on 4+3 or 2+2+2 devices. It must end with the weights of a job in
which nothing happened, having used every sample once; its account of time must add up; and nothing may be left of it.
`--seed N` runs one job. The folders are kept where something was wrong, or a seed was given.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.report import parse_arguments, publish, spread, surroundings
from tests.e2e.command import TINY_MODEL, TinyJob, write_tiny_files
from uneven.elastic.faults import Phase, parse_fault
from uneven.goodput import Event
from uneven.goodput.events import FILE as EVENTS
from uneven.goodput.events import read_events
from uneven.goodput.report import MAX_UNACCOUNTED, read_run

HANG_S = 1.0
LARGEST_DIFFERENCE = 1e-10
IN_STEP: tuple[Phase, ...] = ("forward", "backward", "sync", "commit", "apply", "gather")
IN_RECOVERY: tuple[Phase, ...] = ("recovery", "reshard")
STEPS_TO_JOIN = 25
"""A device that returns is there after so many steps, or else what is to happen to it is not reached."""
STEPS_TO_LEAVE = 8
TIMEOUT_S = 900.0
MARK = "UNEVEN_CHAOS"
"""In the environment of all processes of a job, by which they are found."""


@dataclass(frozen=True, slots=True)
class Form:
    """How many steps a job has, and until how many faults jobs are run."""

    steps: int
    num_faults: int
    degrees: tuple[tuple[int, ...], ...] = ((4, 3), (2, 2, 2))


LONG = Form(steps=160, num_faults=200)
SHORT = Form(steps=45, num_faults=5, degrees=((2, 2, 2),))


class Draw:
    """A history of faults. Who is there at a step is a guess: nobody knows when who returns will be ready."""

    def __init__(self, seed: int, form: Form) -> None:
        self.random = random.Random(seed)
        self.degrees = form.degrees[seed % len(form.degrees)]
        replicas = [replica for replica, degree in enumerate(self.degrees) for _ in range(degree)]
        self.replica_of = dict(enumerate(replicas))
        self.here_from = dict.fromkeys(self.replica_of, 0)
        self.returns_from: dict[int, int] = {}
        self.faults: list[str] = []
        step = 2
        while (step := step + self.random.randint(1, 6)) < form.steps - STEPS_TO_JOIN:
            self._add(step)

    def _add(self, step: int) -> None:
        here = [device for device, first in self.here_from.items() if first <= step]
        may_return = [device for device, first in self.returns_from.items() if first <= step]
        wants_return = self.random.random() < len(self.returns_from) / len(self.replica_of)
        if may_return and (wants_return or len(here) < 3):
            self._return(self.random.choice(may_return), step)
        elif len(here) >= 3:
            self._lose(here, step)

    def _return(self, device: int, step: int) -> None:
        del self.returns_from[device]
        self._happen("return", device, step=step)
        if self.random.random() < 0.15:
            # Once more: it dies as soon as it takes part.
            self._happen(self.random.choice(["kill", "hang"]), device, phase="join")
            self.returns_from[device] = step + STEPS_TO_JOIN
        else:
            self.here_from[device] = step + STEPS_TO_JOIN

    def _lose(self, here: list[int], step: int) -> None:
        """Mostly, somebody of another replica stays, who has all of the state; else the job may have to begin anew."""
        device = self.random.choice(here)
        others = [other for other in here if other != device]
        if len({self.replica_of[other] for other in others}) < 2 and self.random.random() < 0.9:
            return
        action = self.random.choice(["kill", "kill", "hang", "drain"])
        phase = None if action == "drain" else self.random.choice(IN_STEP)
        self._happen(action, device, phase=phase, step=step)
        self._gone(device, step)
        if phase in IN_STEP[:4] and len(others) > 2 and self.random.random() < 0.2:
            second = self.random.choice(others)
            self._happen("kill", second, phase=self.random.choice(IN_RECOVERY), step=step)
            self._gone(second, step)

    def _gone(self, device: int, step: int) -> None:
        del self.here_from[device]
        self.returns_from[device] = step + STEPS_TO_LEAVE

    def _happen(self, action: str, device: int, *, phase: Phase | None = None, step: int | None = None) -> None:
        where = [f"{key}={value}" for key, value in (("step", step), ("phase", phase)) if value is not None]
        self.faults.append(f"{action}:device={device},{','.join(where)}")


@dataclass(slots=True)
class Found:
    """A job, and what was wrong with it."""

    seed: int
    degrees: tuple[int, ...]
    drawn: list[str]
    missed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    difference: float = 0.0
    unaccounted: float = 0.0
    num_anew: int = 0
    num_innocent: int = 0
    detect_s: dict[str, list[float]] = field(default_factory=dict)
    recover_s: dict[str, list[float]] = field(default_factory=dict)

    @property
    def fired(self) -> Counter[str]:
        """Faults that have happened, by action."""
        return Counter(text.partition(":")[0] for text in (Counter(self.drawn) - Counter(self.missed)).elements())


class Jobs:
    """Jobs in one folder, all on the same data, and the one in which nothing happens."""

    def __init__(self, folder: Path, form: Form) -> None:
        self.form = form
        self.folder = folder
        write_tiny_files(folder / "files")
        model = folder / "files" / "model" / "config.json"
        model.write_text(json.dumps(TINY_MODEL | {"num_hidden_layers": 1}))
        self.job = TinyJob(folder / "files", folder)
        self.start("quiet", "--replicas", "1", hang_s=60.0).wait()
        self.weights = load_file(folder / "quiet" / "model" / "model.safetensors")
        self.metrics = self.job.metrics("quiet")

    def start(self, out: str, *arguments: str, hang_s: float = HANG_S) -> subprocess.Popen[bytes]:
        """`uneven train` with a folder of its own for temporary files; what it prints goes to OUT.txt."""
        settings = self.job.settings(
            train__steps=self.form.steps, train__precision="fp64", elastic__hang_s=hang_s, log__samples=True
        )
        (scratch := self.folder / f"{out}.tmp").mkdir()
        with (self.folder / f"{out}.txt").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "uneven", "train", *arguments, "--out", out, *settings],
                cwd=self.folder,
                env=os.environ | {MARK: f"{self.folder}/{out}", "TMPDIR": str(scratch)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(self, seed: int) -> Found:
        """The job of a seed, and all checks on it."""
        draw, out = Draw(seed, self.form), f"seed-{seed}"
        found = Found(seed, draw.degrees, draw.faults)
        arguments = [part for text in found.drawn for part in ("--fault", text)]
        began = time.monotonic()
        process = self.start(out, "--replicas", ",".join(map(str, draw.degrees)), *arguments)
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            found.problems.append(f"still running after {TIMEOUT_S:.0f} s")
            process.kill()
            code = process.wait()
        found.wall_s = time.monotonic() - began
        self._check_leftovers(found, out)
        self._check_events(found, read_events(self.folder / out / EVENTS))
        if code:
            last = (self.folder / f"{out}.txt").read_text().strip().splitlines()[-1:]
            found.problems.append(f"exit code {code}: {' '.join(last)}")
        else:
            self._check_result(found, out)
        return found

    def _check_result(self, found: Found, out: str) -> None:
        weights = load_file(self.folder / out / "model" / "model.safetensors")
        found.difference = max(float((weights[name] - each).abs().max()) for name, each in self.weights.items())
        if not found.difference <= LARGEST_DIFFERENCE:
            found.problems.append(f"weights differ by {found.difference:g}, at most {LARGEST_DIFFERENCE:g} may be")
        lines = self.job.metrics(out)
        if [line["step"] for line in lines] != list(range(1, self.form.steps + 1)):
            found.problems.append(f"steps in the metrics: {[line['step'] for line in lines]}")
        used = Counter(sample for line in lines for sample in line["samples"])
        wanted = Counter(sample for line in self.metrics for sample in line["samples"])
        if used != wanted or max(used.values()) > 1:
            found.problems.append(f"samples left out {wanted - used}, used too often {used - wanted}")
        found.unaccounted = read_run(self.folder / out)[1].unaccounted
        if not found.unaccounted < MAX_UNACCOUNTED:
            found.problems.append(f"{found.unaccounted:.2%} of the time is not accounted for")

    def _check_events(self, found: Found, events: Sequence[Event]) -> None:
        # An event's text names a phase for what happens between steps, too.
        texts = {str(parse_fault(text)): text for text in found.drawn}
        fired = Counter(texts[event.text] for event in events if event.kind == "fault")
        found.missed = sorted((Counter(found.drawn) - fired).elements())
        hangs = Counter(text.partition(",")[0] for text in fired.elements() if text.startswith("hang"))
        for event in events:
            if event.kind == "hang":
                name = f"hang:device={event.device}"
                found.num_innocent += hangs[name] == 0
                hangs[name] -= 1
            if event.kind == "failure" and event.detect_s is not None:
                kind = "hang" if event.detect_s > HANG_S / 2 else "kill"
                found.detect_s.setdefault(kind, []).append(event.detect_s)
            if event.kind in ("recovery", "join", "drain") and event.recover_s is not None:
                found.recover_s.setdefault(event.kind, []).append(event.recover_s)
                found.num_anew += event.text.endswith("is lost")

    def _check_leftovers(self, found: Found, out: str) -> None:
        """Processes, which have a moment to end; sockets and what else lies among temporary files; half a model."""
        deadline = time.monotonic() + 5.0
        while (left := marked(f"{self.folder}/{out}")) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid, name in left.items():
            found.problems.append(f"process {pid} is left: {name}")
            os.kill(pid, signal.SIGKILL)
        paths = [
            *(self.folder / f"{out}.tmp").iterdir(),
            *(self.folder / out / n for n in ("requests", "model.partial")),
        ]
        found.problems += [f"{path} is left" for path in paths if path.exists()]


def marked(value: str) -> dict[int, str]:
    """Processes of a job, by their environment, with their name, state and parent."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "stat").read_text()[:60]
        except OSError:
            continue  # it has ended, or is another user's
    return found


def measure(form: Form, *, seed: int | None = None) -> list[Found]:
    """Jobs until enough faults have happened; only that of `seed` if one is given."""
    jobs: list[Found] = []
    folder = Path(tempfile.mkdtemp(prefix="uneven-chaos-"))
    runner = Jobs(folder, form)
    for number in range(form.num_faults) if seed is None else [seed]:
        job = runner.run(number)
        jobs.append(job)
        fired = ", ".join(f"{count} {action}s" for action, count in sorted(job.fired.items()))
        print(
            f"seed {job.seed}, {job.wall_s:.0f} s: {fired}, {len(job.missed)} missed; {job.problems or 'all is well'}"
        )
        if sum(job.fired.total() for job in jobs) >= form.num_faults:
            break
    if seed is None and not any(job.problems for job in jobs):
        shutil.rmtree(folder)
    else:
        print(f"the jobs' folders are in {folder}")
    return jobs


def page(form: Form, jobs: Sequence[Found]) -> list[str]:
    fired = sum((job.fired for job in jobs), Counter[str]())
    problems = [f"- seed {job.seed}: {problem}" for job in jobs for problem in job.problems]
    num_drawn = sum(len(job.drawn) for job in jobs)
    lines = [
        "# Faults at random",
        "",
        f"{len(jobs)} jobs of {form.steps} steps on {' and '.join('+'.join(map(str, d)) for d in form.degrees)} "
        f"devices, seeds 0 to {len(jobs) - 1}: of {num_drawn} faults drawn {fired.total()} happened "
        f"({', '.join(f'{count} {action}s' for action, count in sorted(fired.items()))}). The others were not reached: "
        "their device was not there, or its part of a recovery never came.",
        "",
        "| after each job | worst | allowed |",
        "|---|---|---|",
        f"| largest difference of a weight to a job in which nothing happened | "
        f"{max(job.difference for job in jobs):.1e} | {LARGEST_DIFFERENCE:g} |",
        f"| time not accounted for | {max(job.unaccounted for job in jobs):.2%} | {MAX_UNACCOUNTED:.0%} |",
        f"| jobs with samples, steps, processes or files that are too many or lacking, or another exit code | "
        f"{sum(bool(job.problems) for job in jobs)} | 0 |",
        "",
        *(["What went wrong:", "", *problems, ""] if problems else []),
        f"Jobs that began anew, since the last copy of something died: {sum(job.num_anew for job in jobs)} times. "
        f"Ranks ended as hanging that were only slow (the limit is {HANG_S:g} s): "
        f"{sum(job.num_innocent for job in jobs)}.",
        "",
        "| seconds | median (smallest to largest) |",
        "|---|---|",
    ]
    for what, name in (("detect_s", "to notice a {}"), ("recover_s", "from notice or decision to the end of a {}")):
        for kind in ("kill", "hang", "recovery", "join", "drain"):
            if seconds := [each for job in jobs for each in getattr(job, what).get(kind, [])]:
                lines.append(f"| {name.format(kind)} | {spread(seconds)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> list[Found]:
    options = parse_arguments(__doc__, argv, seed="only the job of this seed, whose folder is kept")
    load_before = os.getloadavg()[0]
    form = SHORT if options.quick else LONG
    jobs = measure(form, seed=options.seed)
    lines = [*page(form, jobs), "", surroundings("chaos", load_before=load_before)]
    publish("chaos", lines, raw=[asdict(job) for job in jobs], options=options)
    return jobs


if __name__ == "__main__":
    sys.exit(any(job.problems for job in main()))
