"""What `uneven` costs on one device, and what dividing a model between two processes of one machine brings.

    .venv/bin/python -m benchmarks.overhead --write

One device: steps of the trainer behind `uneven train --replicas 1` take turns with a plain loop over the stock model
of transformers (AdamW with foreach, gradient clipping), from the same weights, on the same batches, with the same
threads, in fp32; both must have the same losses. What is timed is the trainer's step, without the launcher and its
files, and both sides restart attention at documents. Two devices: a job of two ranks with a thread each takes turns
with one process of two threads and of one; operators, collectives and their latency say where the difference goes.
"""

import json
import os
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import parse_arguments, publish, ratio, spread, surroundings, verdict
from uneven.comm import Transport, World
from uneven.config import TrainConfig
from uneven.elastic.quorum import Quorum
from uneven.launch.launcher import LaunchSettings
from uneven.launch.rank import Mailbox
from uneven.launch.run import launch
from uneven.train.inputs import model_inputs
from uneven.train.job import Job, design_job, prepare_job
from uneven.train.program import Trainer

AT_LEAST = 0.97
LARGEST_DIFFERENCE = 1e-3
"""Of losses in nats per token: what rounding may do to some dozens of steps in fp32."""
PAIR, TWO_THREADS, ONE_THREAD = "two ranks", "one process, 2 threads", "one process, 1 thread"
MATRIX_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::_scaled_dot_product")
COLLECTIVES = ("_ReduceFromTP", "_CopyToTPBackward", "_VocabParallelCrossEntropy", "sync", "commit and apply")
"""What waits for other ranks, by the names in a trace."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model and its run: `rounds` turns of `steps` steps each, after a turn to warm up."""

    name: str
    model: dict[str, Any] | None
    rounds: int
    steps: int


MEDIUM = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}
FULL = (Size("1.2M", None, rounds=40, steps=2), Size("20M", MEDIUM, rounds=12, steps=1))
SMALL = {**MEDIUM, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
QUICK = (Size("tiny", SMALL, rounds=2, steps=1),)


def make_job(size: Size, folder: Path, *, degree: int) -> Job:
    """Of one replica of `degree` devices on a small corpus; a step is one forward pass of the default batch."""
    settings: dict[str, Any] = {
        "data": {"paths": [f"{sysconfig.get_paths()['stdlib']}/asyncio"], "cache": str(folder / "cache")},
        # At a high learning rate rounding grows, within dozens of steps, to what looks like other work.
        "train": {"micro_batch": TrainConfig().train.global_batch, "lr": 3e-4},
        "parallel": {"replicas": [degree]},
    }
    if size.model is not None:
        (folder / "model.json").write_text(json.dumps(size.model))
        settings["model"] = str(folder / "model.json")
    return prepare_job(design_job(TrainConfig.model_validate(settings)))


def quorum_mailbox(job: Job, device: int) -> Mailbox:
    """A line on which the job's first quorum waits; what the rank says is heard by nobody."""
    ours, theirs = Pipe()
    plan = job.plan
    ours.send(Quorum(0, plan.devices, plan, plans={0: plan}))

    def listen() -> None:
        while True:
            ours.recv()

    threading.Thread(target=listen, daemon=True).start()
    return Mailbox(device, theirs)


def lone_trainer(job: Job) -> Trainer:
    world = World(0, [0], store=torch.distributed.HashStore(), transport=Transport())
    return Trainer(job, world, mailbox=quorum_mailbox(job, 0))


def next_step(trainer: Trainer) -> float:
    """The loss of the next step."""
    with trainer.member.begin() as step:
        return trainer.step(step).loss


class PlainLoop:
    """What one writes by hand, with the weights, batches, learning rates and weight decay of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        job, config = trainer.job, trainer.job.config.train
        settings = {key: value for key, value in job.design.spec.config.items() if key not in ("model_type", "dtype")}
        stock = AutoConfig.for_model(job.design.spec.family, **settings)
        self.model = AutoModelForCausalLM.from_config(stock, dtype=torch.float32)
        with trainer.member.begin():
            self.model.load_state_dict(trainer.member.model.state_dict())
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, foreach=True)
        self.job, self.schedule, self.clip = job, trainer.schedule, config.clip
        self.reader = job.dataset.open()

    def step(self, step: int) -> float:
        rows = self.reader.batch(self.job.batch_numbers(step), seed=self.job.config.seed)
        loss = self.model(**model_inputs(rows, device=torch.device("cpu"))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@dataclass(frozen=True, slots=True)
class OneDevice:
    """Seconds a step, one a round, and the largest difference of two losses."""

    ours_s: list[float]
    plain_s: list[float]
    difference: float


def one_device(size: Size, folder: Path) -> OneDevice:
    trainer = lone_trainer(make_job(size, folder, degree=1))
    plain = PlainLoop(trainer)
    losses: dict[str, list[float]] = {"ours": [], "plain": []}
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    turns: dict[str, Callable[[int], float]] = {
        "ours": lambda _: next_step(trainer),
        "plain": plain.step,
    }
    for number in range(size.rounds + 1):
        # The order alternates, so that a load that rises or falls favours neither.
        for name in list(turns)[:: 1 if number % 2 else -1]:
            began = time.perf_counter()
            for step in range(number * size.steps + 1, (number + 1) * size.steps + 1):
                losses[name].append(turns[name](step))
            times[name].append((time.perf_counter() - began) / size.steps)
    difference = max(abs(a - b) for a, b in zip(losses["ours"], losses["plain"], strict=True))
    assert difference < LARGEST_DIFFERENCE, f"the losses differ by {difference}: this is not the same work"
    return OneDevice(times["ours"][1:], times["plain"][1:], difference)


# Two devices


@dataclass(frozen=True, slots=True)
class Operators:
    """Seconds of a step in matrix products and attention, in collectives, in other operators, and in Python."""

    products_s: float
    collectives_s: float
    others_s: float
    python_s: float


@dataclass(frozen=True, slots=True)
class TwoDevices:
    """Of one rank: seconds a step by kind of process, and what the pair sums in a step."""

    times_s: dict[str, list[float]]
    operators: dict[str, Operators]
    losses: list[float]
    calls: int = 0
    payload_bytes: int = 0
    latency_s: float = 0.0


def operators_of(run: Callable[[], None], *, steps: int) -> Operators:
    """What the main thread does in `steps` steps; the profiler itself makes small operators look longer."""
    began = time.perf_counter()
    with profile() as recorded:
        run()
    wall = (time.perf_counter() - began) / steps
    products = collectives = others = 0.0
    for event in recorded.key_averages():
        seconds = event.self_cpu_time_total * 1e-6 / steps
        if event.key.startswith(MATRIX_PRODUCTS):
            products += seconds
        elif event.key in COLLECTIVES:
            collectives += seconds
        elif not event.key.startswith("gloo:"):  # those are on threads of gloo
            others += seconds
    return Operators(products, collectives, others, max(0.0, wall - products - collectives - others))


def two_devices_rank(world: World, size: Size, single: Job, pair: Job) -> TwoDevices:
    """Devices 0 and 1 are the pair, device 2 is the one process; they work in turn and wait for one another."""
    is_pair = world.device < 2
    scoped = world.scoped("pair", [0, 1]) if is_pair else None
    trainer = (
        lone_trainer(single) if scoped is None else Trainer(pair, scoped, mailbox=quorum_mailbox(pair, world.device))
    )
    with trainer.member.begin():
        pass  # till then the first quorum interrupts whatever else this rank does
    times: dict[str, list[float]] = {PAIR: [], TWO_THREADS: [], ONE_THREAD: []}
    operators: dict[str, Operators] = {}
    losses: list[float] = []

    def run(steps: int) -> None:
        losses.extend(next_step(trainer) for _ in range(steps))

    for number in range(size.rounds + 1):
        for kind in times:
            world.everyone(purpose="turns").all_reduce(torch.zeros(1))
            if (kind == PAIR) != is_pair:
                continue
            torch.set_num_threads(2 if kind == TWO_THREADS else 1)
            began = time.perf_counter()
            run(size.steps)
            times[kind].append((time.perf_counter() - began) / size.steps)
            if number == size.rounds:
                operators[kind] = operators_of(lambda: run(size.steps), steps=size.steps)
    world.everyone(purpose="turns").all_reduce(torch.zeros(1))
    times = {kind: found[1:] for kind, found in times.items() if found}
    if scoped is None:
        return TwoDevices(times, operators, losses)
    calls, payload = scoped.traffic.calls("tp") // len(losses), scoped.traffic.payload_bytes("tp") // len(losses)
    config = pair.config.train
    hidden = torch.zeros(config.micro_batch * config.seq_len * trainer.member.model.config.hidden_size)
    return TwoDevices(times, operators, losses, calls, payload, latency_s(scoped, hidden))


def latency_s(world: World, tensor: torch.Tensor, *, repetitions: int = 30) -> float:
    """Of one all-reduce of a tensor over the pair, when both are ready for it."""
    group = world.everyone(purpose="probe")
    times = []
    for _ in range(repetitions):
        group.all_reduce(torch.zeros(1))
        began = time.perf_counter()
        group.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    return spread(times).median


def two_devices(size: Size, folder: Path) -> tuple[TwoDevices, TwoDevices]:
    """Of the pair's first rank, and of the one process."""
    single, pair = (make_job(size, folder, degree=degree) for degree in (1, 2))
    settings = LaunchSettings(num_threads=1)
    first, _, alone = launch(two_devices_rank, size, single, pair, num_devices=3, settings=settings)
    # The one process has two turns a round and so makes more steps; its first ones are the pair's.
    difference = max(abs(a - b) for a, b in zip(first.losses, alone.losses, strict=False))
    assert difference < LARGEST_DIFFERENCE, f"the losses differ by {difference}: this is not the same work"
    return first, alone


def one_device_lines(results: dict[str, OneDevice]) -> list[str]:
    lines = [
        "| model | tokens per second, uneven / plain | target | largest difference of losses, nats |",
        "|---|---|---|---|",
    ]
    for name, result in results.items():
        speed = ratio(result.plain_s, result.ours_s)
        lines.append(f"| {name} | {speed} | {verdict(speed.median, at_least=AT_LEAST)} | {result.difference:.1e} |")
    return lines


def two_devices_lines(results: dict[str, tuple[TwoDevices, TwoDevices]]) -> list[str]:
    lines = []
    for name, (pair, alone) in results.items():
        against_two = ratio(alone.times_s[TWO_THREADS], pair.times_s[PAIR])
        against_one = ratio(alone.times_s[ONE_THREAD], pair.times_s[PAIR])
        threads = ratio(alone.times_s[ONE_THREAD], alone.times_s[TWO_THREADS])
        step = spread(pair.times_s[PAIR]).median
        lines += [
            f"**{name}.** Tokens per second of two ranks: {against_two} of one process of 2 threads, {against_one} of "
            f"one thread; a second thread alone brings {threads}. A step has {pair.calls} all-reduces within the pair, "
            f"of {pair.payload_bytes / 1e6:.1f} MB together; one of hidden states takes {pair.latency_s * 1e3:.2f} ms, "
            f"so that their share of a step is about {pair.calls * pair.latency_s / step:.0%}.",
            "",
            "| part of a step, one thread and the whole model = 1 | matrix products, attention | collectives | "
            "other operators | Python |",
            "|---|---|---|---|---|",
        ]
        found = {**alone.operators, **pair.operators}
        base = found[ONE_THREAD]
        whole = sum(astuple(base))
        for kind in (ONE_THREAD, TWO_THREADS, PAIR):
            each = found[kind]
            parts = " | ".join(f"{part / whole:.2f}" for part in astuple(each))
            lines.append(f"| {kind} | {parts} |")
        lines.append("")
    return lines


@dataclass(frozen=True, slots=True)
class Result:
    one: dict[str, OneDevice]
    two: dict[str, tuple[TwoDevices, TwoDevices]]


def page(sizes: Sequence[Size], result: Result) -> list[str]:
    rounds = ", ".join(f"{size.rounds} rounds of {size.steps} steps ({size.name})" for size in sizes)
    return [
        "# A training step of uneven against a plain loop",
        "",
        "## One device",
        "",
        f"fp32, a batch of 9 sequences of 128 tokens, {torch.get_num_threads()} threads, in turn: {rounds}. The plain "
        "loop is the stock model with `torch.optim.AdamW(foreach=True)` and `clip_grad_norm_`.",
        "",
        *one_device_lines(result.one),
        "",
        "## Two devices on two cores",
        "",
        "One replica of two ranks with a thread each, in turn with one process of the same trainer.",
        "",
        *two_devices_lines(result.two),
    ]


def raw(result: Result) -> Any:
    return {
        "one device": {n: {"ours_s": r.ours_s, "plain_s": r.plain_s} for n, r in result.one.items()},
        "two devices": {n: {**alone.times_s, **pair.times_s} for n, (pair, alone) in result.two.items()},
    }


def main(argv: Sequence[str] | None = None) -> Result:
    options = parse_arguments(__doc__, argv)
    load_before = os.getloadavg()[0]
    sizes = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as name:
        one = {size.name: one_device(size, Path(name)) for size in sizes}
        two = {size.name: two_devices(size, Path(name)) for size in sizes}
    result = Result(one, two)
    lines = [*page(sizes, result), surroundings("overhead", load_before=load_before)]
    publish("overhead", lines, raw=raw(result), options=options)
    return result


if __name__ == "__main__":
    main()
