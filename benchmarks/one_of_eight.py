"""What losing one device of eight costs beside its eighth part: work that can't be divided finely enough.

Devices are built one at a time in this process, over connections that carry nothing, and each phase between two
synchronisations is timed by itself, in CPU time of the thread: two cores can't run eight devices at once, nor need
they, since what counts is the slowest device of each phase. The modelled time of a step is the sum over phases of
their slowest device, of the slowest replica; what the wires add is left out. `recovery` prints it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import verdict
from uneven.comm import Transport, World
from uneven.elastic.division import Division, Recipe
from uneven.layout import ParallelPlan
from uneven.modelspec import ModelSpec, parse_model
from uneven.parallel import build_model, fill_random
from uneven.planner import repartition

BATCH = 64
AT_LEAST = 0.97
LOST = 2
MODEL = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SMALL = MODEL | {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 256}
SEQ_LEN = 128
HOMES = {"8": [[1.0] * 8], "4 + 4": [[1.0] * 4] * 2}
OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of CPU time of each phase of a plan's devices: of a sequence, and of the update of a step."""

    degrees: tuple[int, ...]
    samples: tuple[int, ...]
    seconds: dict[int, dict[str, float]]
    replica_of: dict[int, int]

    def phases(self, replica: int, kind: str = "") -> dict[str, list[float]]:
        """The devices' times of each phase whose name begins with `kind`."""
        found: dict[str, list[float]] = {}
        for device, seconds in self.seconds.items():
            for phase, each in seconds.items() if self.replica_of[device] == replica else ():
                if phase.startswith(kind) and (kind or phase != OPTIMIZER):
                    found.setdefault(phase, []).append(each)
        return found

    def sequence_s(self, *, is_even: str = "") -> list[float]:
        """Of each replica: the slowest device, phase by phase; the mean one in the phases of the kind `is_even`."""
        return [
            sum(
                sum(each) / len(each) if is_even and phase.startswith(is_even) else max(each)
                for phase, each in self.phases(replica).items()
            )
            for replica in range(len(self.degrees))
        ]

    @property
    def optimizer_s(self) -> float:
        return max(seconds[OPTIMIZER] for seconds in self.seconds.values())

    def step_s(self, *, is_even: str = "", is_batch_even: bool = False) -> float:
        """The modelled time of a step; with `is_batch_even` sequences could be cut at will."""
        each = self.sequence_s(is_even=is_even)
        if is_batch_even:
            return BATCH / sum(1 / seconds for seconds in each) + self.optimizer_s
        return max(n * seconds for n, seconds in zip(self.samples, each, strict=True)) + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Loss:
    """A plan of eight devices before and after the loss of one."""

    name: str
    before: Timing
    after: Timing

    @property
    def ratio(self) -> float:
        """8/7 of the undisturbed time over the time found: 1 if seven devices do seven eighths."""
        return 8 / 7 * self.before.step_s() / self.after.step_s()

    @property
    def by_heads(self) -> float:
        """The part of the step that goes by attention's slowest device having more than the mean."""
        return 1 - self.after.step_s(is_even="attention") / self.after.step_s()

    @property
    def by_batch(self) -> float:
        """The part that goes by sequences being whole."""
        return 1 - self.after.step_s(is_batch_even=True) / self.after.step_s()


class _Done:
    """An operation that has been carried out."""

    def wait(self, *_: Any) -> None:
        return

    def is_completed(self) -> bool:
        return True


class _Silence:
    """Connections that carry nothing."""

    def allreduce(self, *_: Any) -> _Done:
        return _Done()

    def alltoall_base(self, *_: Any) -> _Done:
        return _Done()


def lone_world(device: int, devices: Sequence[int]) -> World:
    world = World(device, devices, store=dist.HashStore(), transport=Transport())
    world._connect = lambda *_, **__: _Silence()  # type: ignore[assignment, method-assign, return-value]
    return world


class Device:
    """One device of a plan, and its phases, each of which can be run alone."""

    def __init__(self, spec: ModelSpec, plan: ParallelPlan, device: int) -> None:
        self._world = world = lone_world(device, plan.devices)
        self.division = Division(Recipe(lambda: build_model(spec, dtype=torch.float32)), plan, world=world)
        model = self.division.model
        fill_random(model, self.division.layout, spec=spec, device=device, seed=0)
        self.division.optimizer.set_masters()
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        self._x = torch.randn(1, SEQ_LEN, hidden, requires_grad=True)
        self._tokens = torch.randint(vocab, (1, SEQ_LEN))
        self._angles = model.model.rotary_emb(self._x, torch.arange(SEQ_LEN)[None])
        self.phases: dict[str, Callable[[], None]] = {"vocabulary": self._vocabulary}
        for number, layer in enumerate(model.model.layers):
            self.phases[f"attention {number}"] = lambda layer=layer: self._attention(layer)
            self.phases[f"mlp {number}"] = lambda layer=layer: self._mlp(layer)

    def _attention(self, layer: Any) -> None:
        hidden = layer.input_layernorm(self._x)
        found, _ = layer.self_attn(hidden_states=hidden, position_embeddings=self._angles, attention_mask=None)
        (self._x + found).sum().backward()

    def _mlp(self, layer: Any) -> None:
        (self._x + layer.mlp(layer.post_attention_layernorm(self._x))).sum().backward()

    def _vocabulary(self) -> None:
        model = self.division.model
        hidden = model.model.norm(model.model.embed_tokens(self._tokens) + self._x)
        model.loss_function(model.lm_head(hidden), self._tokens, num_items_in_batch=SEQ_LEN).backward()

    def measure(self, repetitions: int) -> dict[str, float]:
        """The least CPU time of each phase, and of the update, which is the same for gradients of zero."""
        found = {name: least(phase, repetitions) for name, phase in self.phases.items()}
        self.division.connect(self._world)
        reducer = self.division.reducer
        assert reducer is not None
        reducer.begin()
        gradients = reducer.finish()
        update = partial(self.division.optimizer.update, gradients.tiles, lr=1e-4)
        return found | {OPTIMIZER: least(update, repetitions)}


def least(run: Callable[[], None], repetitions: int) -> float:
    times = []
    for _ in range(repetitions + 1):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return min(times[1:])


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timings(spec: ModelSpec, plans: Sequence[ParallelPlan], *, repetitions: int) -> list[Timing]:
    """Of each plan; their devices take turns, so that a load that rises or falls favours none."""
    seconds: list[dict[int, dict[str, float]]] = [{} for _ in plans]
    for device in plans[0].devices:
        for plan, found in zip(plans, seconds, strict=True):
            if device in plan.devices:
                found[device] = Device(spec, plan, device).measure(repetitions)
    return [
        Timing(
            tuple(len(replica.layout.devices) for replica in plan.replicas),
            tuple(plan.samples(BATCH)),
            found,
            {device: plan.replica_of(device) for device in plan.devices},
        )
        for plan, found in zip(plans, seconds, strict=True)
    ]


def measure(*, is_quick: bool) -> list[Loss]:
    spec = parse_model(SMALL if is_quick else MODEL)
    losses = []
    with one_thread():
        for name, shares in HOMES.items():
            home = ParallelPlan.from_shares(spec.structure, shares)
            left = repartition(home, home=home, devices=set(home.devices) - {LOST})
            losses.append(Loss(name, *timings(spec, [home, left], repetitions=1 if is_quick else 4)))
    return losses


def page(losses: Sequence[Loss]) -> list[str]:
    return [
        "## Seven of eight devices",
        "",
        f"A model of hidden size {MODEL['hidden_size']}, {MODEL['num_attention_heads']} heads, "
        f"{MODEL['intermediate_size']} channels and {MODEL['num_hidden_layers']} layers; {BATCH} sequences of "
        f"{SEQ_LEN} tokens. The time of a step is modelled: the sum over attention, mlp and vocabulary, layer by "
        "layer, of the slowest device's CPU time, measured one device at a time, and the update.",
        "",
        f"| devices | after device {LOST} is lost | 8/7 of the undisturbed time over the time after | target | "
        "lost by whole heads | lost by whole sequences |",
        "|---|---|---|---|---|---|",
        *(
            f"| {each.name} | {' + '.join(map(str, each.after.degrees))}, "
            f"{' + '.join(map(str, each.after.samples))} sequences | {each.ratio:.3f} | "
            f"{verdict(each.ratio, at_least=AT_LEAST)} | {each.by_heads:.1%} | {each.by_batch:.1%} |"
            for each in losses
        ),
    ]
