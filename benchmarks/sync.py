"""What summing the gradients of unlike replicas costs: bytes and time against 4+4 and against the published scheme.

    .venv/bin/python -m benchmarks.sync --write

Sums 50 million fp32 gradients of a Llama over two replicas: 4+4; 4+3 by tuples of owners, as `uneven` does; and 4+3
gathered to core devices (`gather_to_core.py`). The gradients are made up, and the sums are checked bit by bit. The
three take turns within one job on this machine's loopback and, as root, between two network namespaces whose link
carries 1 Gbit/s. For machines that are not at hand there is arithmetic (`sync_model.py`).
"""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import nn

from benchmarks import sync_model
from benchmarks.gather_to_core import INSIDE, PAIRS, GatherReducer, gather_plan
from benchmarks.report import parse_arguments, publish, ratio, surroundings, verdict
from benchmarks.sync_model import GATHER, OWNERS, UNIFORM
from benchmarks.two_hosts import Host, enter, two_hosts
from uneven.comm import Transport, World, connect_store, serve_store
from uneven.launch.launcher import LaunchSettings
from uneven.launch.run import launch
from uneven.layout import ModelStructure, ParallelPlan, ParameterSpec, Replicate
from uneven.modelspec import parse_model
from uneven.parallel import take_ranges
from uneven.sync import PURPOSE, GradReducer

HEALTHY, REDUCED = 4, 3
NUM_RANKS = 2 * HEALTHY
SCHEMES = (UNIFORM, OWNERS, GATHER)
TITLES = {UNIFORM: "4+4", OWNERS: "4+3, tuples of owners", GATHER: "4+3, gathered to core"}
FP32_BYTES = 4
ALONE, COLLECTED = "alone", "collected"
"""What is timed: the sums of buffers that are full, or a backward pass too, which fills them by hooks."""
RATE = "1gbit"
TIMEOUT_S = 120.0
AT_MOST_UNIFORM, AT_MOST_GATHER = 1.1, 0.75


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and the run; 12 heads and 12 times 12 channels divide evenly among 4 and among 3."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    bucket_bytes: int
    repetitions: int
    link_repetitions: int

    def structure(self) -> ModelStructure:
        config = {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": 12,
            "vocab_size": self.vocab_size,
        }
        return parse_model(config).structure


FULL = Size(hidden_size=768, num_layers=5, vocab_size=7680, bucket_bytes=25 * 2**20, repetitions=25, link_repetitions=5)
QUICK = Size(hidden_size=96, num_layers=2, vocab_size=768, bucket_bytes=2**18, repetitions=2, link_repetitions=1)


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sends in one reduction, with its operations, and the bound: 2 (R - 1) / R of what it holds."""

    between_bytes: Fraction
    inside_bytes: Fraction
    operations: int
    bound_bytes: Fraction
    data_parallel_bytes: Fraction

    @property
    def total_bytes(self) -> Fraction:
        return self.between_bytes + self.inside_bytes


def plans(structure: ModelStructure) -> dict[str, ParallelPlan]:
    return {
        UNIFORM: ParallelPlan.from_shares(structure, [[1] * HEALTHY, [1] * HEALTHY]),
        OWNERS: ParallelPlan.from_shares(structure, [[1] * HEALTHY, [1] * REDUCED]),
        GATHER: gather_plan(structure, healthy=HEALTHY, reduced=REDUCED),
    }


# Gradients that are made up


def made_up(spec: ParameterSpec, *, seed: int) -> torch.Tensor:
    """A whole gradient of small integers, so that sums are exact in any order."""
    return ((torch.arange(spec.num_elements) + seed) % 1009).float().view(spec.shape)


def local_gradients(plan: ParallelPlan, device: int, *, replicas: Sequence[int]) -> dict[str, torch.Tensor]:
    """This device's part of the sum of some replicas' gradients."""
    layout = plan.layout_of(device)
    found = {}
    for index, spec in enumerate(plan.structure.parameters):
        whole = sum(made_up(spec, seed=101 * index + 37 * replica) for replica in replicas)
        found[spec.name] = take_ranges(whole, spec, ranges=layout.spec_ranges(spec, device))
    return found


def bare_model(gradients: dict[str, torch.Tensor]) -> nn.Module:
    """Parameters of these names and shapes, without a forward pass."""
    model = nn.Module()
    for name, gradient in gradients.items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.zeros_like(gradient)))
    return model


class _Give(torch.autograd.Function):
    """Forward zero, backward the gradients that it was given."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.gradients


# On the ranks


class Reduction:
    """One scheme on one rank: its part of a plan, gradients for it, and the reducer."""

    def __init__(self, scheme: str, plan: ParallelPlan, *, world: World, bucket_bytes: int) -> None:
        self.plan, self.world = plan, world
        self.gradients = local_gradients(plan, world.device, replicas=[plan.replica_of(world.device)])
        self.model = bare_model(self.gradients)
        reducer = GatherReducer if scheme == GATHER else GradReducer
        self.reducer = reducer(self.model, plan, world=world, bucket_bytes=bucket_bytes)

    def run(self, kind: str) -> Any:
        """Of an ALONE kind the timer starts after the buffers have been cleared; the time in seconds comes first."""
        self.reducer.begin(int(kind == COLLECTED))
        self.wait_for_all()
        began = time.monotonic()
        if kind == COLLECTED:
            _Give.apply(tuple(self.gradients.values()), *self.model.parameters()).backward()
        sums = self.reducer.finish()
        return (began, time.monotonic()), sums

    def wait_for_all(self) -> None:
        self.world.everyone(purpose="barrier").all_reduce(torch.zeros(1))

    def check(self) -> Sent:
        """Reduce once, compare with a direct sum, and count. Warms up, too."""
        before = self._counts()
        _, sums = self.run(COLLECTED)
        after = self._counts()
        between, inside, operations = (now - then for now, then in zip(after, before, strict=True))
        for name, needed in local_gradients(self.plan, self.world.device, replicas=(0, 1)).items():
            found = sums.by_name()[name]
            assert torch.equal(found, needed), f"{name}: the sum on device {self.world.device} is wrong"
        bound = sum(ring_bytes(gradient.numel(), 2) for gradient in self.gradients.values())
        # A replicated parameter is summed over the whole job, divided ones over their two owners.
        ordinary = sum(
            ring_bytes(
                prod(self.gradients[spec.name].shape),
                len(self.plan.devices) if isinstance(spec.placement, Replicate) else 2,
            )
            for spec in self.plan.structure.parameters
        )
        return Sent(between, inside, int(operations), bound, ordinary)

    def _counts(self) -> tuple[Fraction, Fraction, int]:
        traffic = self.world.traffic
        between = traffic.sent_bytes(PURPOSE) + traffic.sent_bytes(PAIRS)
        operations = sum(traffic.calls(purpose) for purpose in (PURPOSE, PAIRS, INSIDE))
        return between, traffic.sent_bytes(INSIDE), operations


def ring_bytes(elements: int, group_size: int) -> Fraction:
    return Fraction(2 * (group_size - 1) * elements * FP32_BYTES, group_size)


@dataclass(frozen=True, slots=True)
class Measured:
    """One rank's counts by scheme, and for each round (scheme, kind) to the seconds at which it began and ended."""

    sent: dict[str, Sent]
    rounds: list[dict[tuple[str, str], tuple[float, float]]]


def measure_rank(world: World, size: Size, place: tuple[int, tuple[Host, ...]] | None) -> Measured:
    """The program of a rank; with `place` (the port of a store, hosts by replica) it moves to its replica's host."""
    if place is not None:
        port, hosts = place
        host = hosts[0 if world.device < HEALTHY else 1]
        # Connected before the move, the store is reached from inside too.
        store = connect_store("127.0.0.1", port, timeout_s=TIMEOUT_S)
        enter(host)
        transport = Transport(host=host.address, timeout_s=TIMEOUT_S)
        world = World(world.device, world.devices, store=store, transport=transport)
    mine = {}
    for scheme, plan in plans(size.structure()).items():
        if world.device in plan.devices:
            scoped = world.scoped(scheme, plan.devices)
            mine[scheme] = Reduction(scheme, plan, world=scoped, bucket_bytes=size.bucket_bytes)
    sent = {scheme: reduction.check() for scheme, reduction in mine.items()}
    rounds = []
    for _ in range(size.repetitions):
        times = {}
        for kind in (ALONE, COLLECTED):
            for scheme, reduction in mine.items():
                # The device that only 4+4 has waits here for the others.
                world.everyone(purpose="turns").all_reduce(torch.zeros(1))
                times[scheme, kind], _ = reduction.run(kind)
            if len(mine) < len(SCHEMES):
                for _ in range(len(SCHEMES) - len(mine)):
                    world.everyone(purpose="turns").all_reduce(torch.zeros(1))
        rounds.append(times)
    return Measured(sent, rounds)


# In the parent


@dataclass(frozen=True, slots=True)
class Result:
    """Counts by scheme and device; seconds by scheme and kind, one a round: first start to last end of any rank."""

    sent: dict[str, list[Sent]]
    wall_s: dict[tuple[str, str], list[float]]


def measure(size: Size, hosts: tuple[Host, ...] = ()) -> Result:
    """All schemes in turn on eight ranks, on this host or on two of `two_hosts`."""
    store = serve_store("127.0.0.1", timeout_s=TIMEOUT_S)
    place = (store.port, hosts) if hosts else None
    settings = LaunchSettings(Transport(timeout_s=TIMEOUT_S), num_threads=1)
    ranks = launch(measure_rank, size, place, num_devices=NUM_RANKS, settings=settings)
    wall_s = {}
    for scheme in SCHEMES:
        for kind in (ALONE, COLLECTED):
            spans = [
                [rank.rounds[n][scheme, kind] for rank in ranks if scheme in rank.sent] for n in range(size.repetitions)
            ]
            wall_s[scheme, kind] = [max(end for _, end in span) - min(start for start, _ in span) for span in spans]
    sent = {scheme: [rank.sent[scheme] for rank in ranks if scheme in rank.sent] for scheme in SCHEMES}
    return Result(sent, wall_s)


def on_two_hosts(size: Size) -> Result | str:
    """The same over a link of RATE, or why not."""
    if os.geteuid() != 0:
        return "not measured: network namespaces need root"
    try:
        with two_hosts(RATE) as hosts:
            return measure(replace(size, repetitions=size.link_repetitions), hosts)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not measured: {getattr(error, 'stderr', '') or error}"


def total_bytes(result: Result, scheme: str, *, between: bool) -> float:
    """Of all ranks, or what crosses from one replica to the other in the busier direction."""
    sent = result.sent[scheme]
    if not between:
        return float(sum(each.total_bytes for each in sent))
    return float(max(sum(each.between_bytes for each in part) for part in (sent[:HEALTHY], sent[HEALTHY:])))


def bytes_table(result: Result) -> list[str]:
    lines = [
        "| scheme | role | between replicas, MB | inside, MB | of the bound | operations |",
        "|---|---|---|---|---|---|",
    ]
    for scheme in SCHEMES:
        sent = result.sent[scheme]
        roles = {
            "replica 0, core": sent[:REDUCED],
            "replica 0, extra": sent[REDUCED:HEALTHY],
            "replica 1": sent[HEALTHY:],
        }
        for role, each in roles.items():
            busiest = max(each, key=lambda one: one.total_bytes)
            between, inside = (float(value) / 1e6 for value in (busiest.between_bytes, busiest.inside_bytes))
            share = float(busiest.total_bytes / busiest.bound_bytes)
            lines.append(
                f"| {TITLES[scheme]} | {role} | {between:.2f} | {inside:.2f} | {share:.4f} | {busiest.operations} |"
            )
    return lines


def times_table(result: Result, *, between: bool) -> list[str]:
    """Wall times against 4+4, scaled by the bytes that share the bottleneck, and against the published scheme."""
    by_bytes = {
        scheme: total_bytes(result, OWNERS, between=between) / total_bytes(result, scheme, between=between)
        for scheme in SCHEMES
    }
    lines = ["| timed | 4+3 by owners / 4+4, scaled by bytes | target | 4+3 by owners / gathered | target |"]
    lines.append("|---|---|---|---|---|")
    for kind in (ALONE, COLLECTED):
        ours, uniform, gather = (result.wall_s[scheme, kind] for scheme in (OWNERS, UNIFORM, GATHER))
        scaled = ratio([time / by_bytes[UNIFORM] for time in ours], uniform)
        published = ratio(ours, gather)
        lines.append(
            f"| {kind} | {scaled} | {verdict(scaled.median, at_most=AT_MOST_UNIFORM)} "
            f"| {published} | {verdict(published.median, at_most=AT_MOST_GATHER)} |"
        )
    parts = f"{by_bytes[UNIFORM]:.2f} of those of 4+4 and {by_bytes[GATHER]:.2f} of those of the published scheme"
    return [*lines, "", f"The bytes that share the bottleneck are {parts}."]


def page(size: Size, loopback: Result, link: Result | str) -> list[str]:
    num_parameters = size.structure().num_parameters
    lines = [
        "# Summing the gradients of unlike replicas",
        "",
        f"{num_parameters / 1e6:.1f} million fp32 gradients of a Llama in buckets of {size.bucket_bytes / 2**20:g} "
        f"MiB, over gloo, {size.repetitions} interleaved repetitions on one host and {size.link_repetitions} on two. "
        "Every sum equals a direct one, bit for bit. Ratios are of wall times, the median of the repetitions and the "
        "range; each time is from the first rank's start to the last one's end.",
        "",
        "## Bytes that the busiest device of a role sends",
        "",
        *bytes_table(loopback),
        "",
        "The bound is 2 (R - 1) / R of what a device holds, as in ordinary data parallelism of R replicas. What is "
        "above it for owners and 4+4 are the norms, which are summed over all devices.",
        "",
        "## Time on one host",
        "",
        "All ranks on this machine's loopback. What they share is the cores, so times are scaled by the bytes of all "
        f"ranks together. `{ALONE}` are the sums alone, of full buffers; `{COLLECTED}` has the hooks of a backward "
        "pass too, which fill them.",
        "",
        *times_table(loopback, between=False),
        "",
        "The published scheme is written here with its phases overlapped, so that it costs little more than its bytes.",
        "",
        f"## Time between two hosts with {RATE} between them",
        "",
        "One replica in each of two network namespaces, joined by one link; it is shared by a replica's devices, so "
        "times are scaled by the bytes that cross it. What the published scheme sends inside a replica overlaps with "
        "the link, which is the slower by far.",
        "",
        *([f"{link}."] if isinstance(link, str) else times_table(link, between=True)),
        "",
        "## By arithmetic, for a NIC on every GPU",
        "",
        "One healthy and one reduced replica. 1 is what a device of two healthy replicas sends, holds or needs. NVLink "
        "carries 0.9 TB/s in each direction, a NIC 800 Gb/s; latency is left out.",
        "",
        *sync_model.table(),
        "",
    ]
    return lines


def raw(result: Result | str) -> Any:
    if isinstance(result, str):
        return result
    sent = {
        scheme: [{k: float(v) for k, v in asdict(one).items()} for one in each] for scheme, each in result.sent.items()
    }
    return {"sent": sent, "wall_s": {f"{scheme}, {kind}": times for (scheme, kind), times in result.wall_s.items()}}


def main(argv: Sequence[str] | None = None) -> tuple[Result, Result | str]:
    options = parse_arguments(__doc__, argv)
    load_before = os.getloadavg()[0]
    size = QUICK if options.quick else FULL
    results = measure(size), on_two_hosts(size)
    lines = [*page(size, *results), surroundings("sync", load_before=load_before)]
    publish("sync", lines, raw={"loopback": raw(results[0]), "link": raw(results[1])}, options=options)
    return results


if __name__ == "__main__":
    main()
