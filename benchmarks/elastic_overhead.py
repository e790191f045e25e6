"""What it costs to be able to go on without a device, while none is lost.

    .venv/bin/python -m benchmarks.elastic_overhead --write

Two ranks of a job train as they do, and take turns, step after step, with what is only there for the sake of
failures switched off: waiting in slices, the marks around waits and at points of a step, signs of life, the account of
time and its messages. What stays is a dozen numbers in the sum that every step has anyway.
"""

import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

from benchmarks.report import Spread, parse_arguments, publish, ratio, spread, surroundings, verdict
from uneven.comm import Group, Pulse, Transport, World
from uneven.config import TrainConfig
from uneven.elastic.coordinator import Coordinator
from uneven.elastic.fleet import Fleet
from uneven.elastic.member import Member
from uneven.elastic.quorum import Spent
from uneven.elastic.supervisor import Supervision, Supervisor
from uneven.goodput import DeviceClock, Event
from uneven.launch.launcher import LaunchSettings
from uneven.launch.rank import Mailbox
from uneven.train.accounts import Accounts
from uneven.train.job import Job, design_job, prepare_job

AT_MOST = 1.01
ELASTIC, PLAIN = "elastic", "plain"
NEVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Form:
    """Rounds of `steps` steps of each kind; the batch makes a step of about 200 ms."""

    rounds: int = 30
    steps: int = 2
    global_batch: int = 9


QUICK = Form(rounds=2, steps=1, global_batch=4)


@contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


_post = Mailbox.post


def _post_no_beat(mailbox: Mailbox, payload: Any, *, kind: str = "post") -> None:
    if kind != "beat":
        _post(mailbox, payload, kind=kind)


@contextmanager
def switched_off() -> Iterator[None]:
    """Without what is there for failures."""
    patches: list[tuple[Any, str, Any]] = [
        (Group, "await_work", lambda _, work: work.wait()),
        (Pulse, "wait", _nothing),
        (Pulse, "reach", lambda *_: None),
        (Pulse, "beat", lambda *_: None),
        (Member, "account", lambda _: None),
        (DeviceClock, "switch", lambda *_: None),
        (DeviceClock, "commit", lambda *_, **__: None),
        (DeviceClock, "busy_s", lambda *_: 0.0),
        (Mailbox, "post", _post_no_beat),
    ]
    with ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(patch.object(target, name, value))
        yield


def rank(world: World, mailbox: Mailbox, job: Job, form: Form) -> dict[str, list[float]]:
    """Seconds a step, of each round, by kind."""
    from uneven.train.program import Trainer  # a rank has it loaded; the launcher would start it later

    trainer = Trainer(job, world, mailbox=mailbox, is_elastic=True)
    times: dict[str, list[float]] = {ELASTIC: [], PLAIN: []}
    for number in range(form.rounds + 1):
        for kind in list(times)[:: 1 if number % 2 else -1]:
            with switched_off() if kind == PLAIN else _nothing():
                began = time.perf_counter()
                for _ in range(form.steps):
                    with trainer.member.begin() as step:
                        trainer.step(step)
                times[kind].append((time.perf_counter() - began) / form.steps)
    return {kind: seconds[1:] for kind, seconds in times.items()}


def measure(form: Form) -> dict[str, list[float]]:
    """Those of the first rank."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        settings: dict[str, Any] = {
            "data": {"paths": [f"{sysconfig.get_paths()['stdlib']}/asyncio"], "cache": str(folder / "cache")},
            "train": {"global_batch": form.global_batch, "steps": 2 * (form.rounds + 1) * form.steps},
            "parallel": {"replicas": [2]},
        }
        job = prepare_job(design_job(TrainConfig.model_validate(settings)))
        fleet = Fleet(rank, (job, form), home=job.plan, settings=LaunchSettings(Transport(), num_threads=1))
        ranks = Supervisor(fleet, coordinator=Coordinator(job.plan), supervision=Supervision(NEVER_S))
        results = {}
        with ranks, Accounts(job, folder, ranks=ranks) as accounts:
            for found in ranks.events():
                if isinstance(found, Event):
                    raise RuntimeError(found.line)
                if isinstance(found.payload, Spent):
                    accounts.spent(found.device, found.payload)
                elif found.kind == "result":
                    results[found.device] = found.payload
    return dict(results[0])


def page(form: Form, times: dict[str, list[float]]) -> list[str]:
    found: Spread = ratio(times[ELASTIC], times[PLAIN])
    return [
        "# Being elastic while nothing fails",
        "",
        f"The built-in model on two ranks of one thread, {form.global_batch} sequences a step; {form.rounds} rounds of "
        f"{form.steps} steps of each kind in turn. A plain step takes {spread([1000 * s for s in times[PLAIN]])} ms.",
        "",
        "| | elastic / plain | target |",
        "|---|---|---|",
        f"| seconds a step, median of the rounds | {found.median:.4f} | {verdict(found.median, at_most=AT_MOST)} |",
        f"| sums over all rounds | {mean(times[ELASTIC]) / mean(times[PLAIN]):.4f} | |",
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, list[float]]:
    options = parse_arguments(__doc__, argv)
    load_before = os.getloadavg()[0]
    form = QUICK if options.quick else Form()
    times = measure(form)
    lines = [*page(form, times), "", surroundings("elastic_overhead", load_before=load_before)]
    publish("elastic_overhead", lines, raw=times, options=options)
    return times


if __name__ == "__main__":
    main()
