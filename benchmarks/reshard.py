"""How fast parts of a model move between devices, beside plain messages of as many bytes.

    .venv/bin/python -m benchmarks.reshard --write

An `Exchange` of a few hundred megabytes takes turns with `send` and `recv` of gloo between the same processes, each of
which sends to its neighbour as much as it does in the exchange. Nothing is packed there and nothing laid out.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.report import Spread, parse_arguments, publish, ratio, surroundings, verdict
from uneven.comm import Transport, World
from uneven.launch.launcher import LaunchSettings
from uneven.launch.run import launch
from uneven.layout import Band, ParameterSpec, Shard, Transfer
from uneven.reshard import Exchange, tiles_of

AT_LEAST = 0.6
FP32_BYTES = 4
EXCHANGE, PLAIN = "exchange", "send and recv"


@dataclass(frozen=True, slots=True)
class Form:
    """Processes, bytes that each of them sends, and repetitions. A parameter has rows of `width` elements."""

    sizes: tuple[int, ...] = (2, 4)
    megabytes: int = 64
    repetitions: int = 7
    width: int = 2048
    num_parameters: int = 16


QUICK = Form(sizes=(2,), megabytes=2, repetitions=2, width=64, num_parameters=4)


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of each repetition, of the slowest process, and the bytes that each process sent in one."""

    num_devices: int
    dim: int
    sent_bytes: int
    seconds: dict[str, list[float]]

    @property
    def ratio(self) -> Spread:
        """Bytes a second of the exchange over those of plain messages."""
        return ratio(self.seconds[PLAIN], self.seconds[EXCHANGE])


def specs_of(form: Form, *, num_devices: int, dim: int) -> list[ParameterSpec]:
    """Parameters that are divided evenly along `dim`, a part of `form.megabytes` on each device in all."""
    elements = form.megabytes * 10**6 // FP32_BYTES // form.num_parameters
    size = elements // form.width * num_devices
    shape = (size, form.width) if dim == 0 else (form.width, size)
    band = Band(0, size, size // num_devices)
    return [
        ParameterSpec(f"parameter {number}", shape, Shard(dim, "mlp", (band,)), "normal")
        for number in range(form.num_parameters)
    ]


def rank(world: World, form: Form, dim: int) -> Result:
    """Each device's part goes to the next one as well: what a device lacks when it joins another's replica."""
    group = world.everyone(purpose="reshard")
    count, device = group.size, world.device
    specs = specs_of(form, num_devices=count, dim=dim)
    stop = specs[0].shape[dim]
    parts = [(number * stop // count, (number + 1) * stop // count) for number in range(count)]
    source, target = {}, {}
    for spec in specs:
        shape = spec.part_shape(stop // count)
        source[spec.name] = tiles_of(torch.full(shape, float(device)), spec, ranges=(parts[device],))
        target[spec.name] = tiles_of(torch.empty(shape), spec, ranges=(parts[device - 1],))
    moves = [Transfer(giver, (giver + 1) % count, spec, (parts[giver],)) for spec in specs for giver in range(count)]
    exchange = Exchange(moves, source=source, target=target, group=group)
    message = torch.empty(sum(spec.num_elements for spec in specs) // count)
    arrived = torch.empty_like(message)
    connections = group._connections

    def plain() -> None:
        works: list[Any] = [
            connections.send([message], (device + 1) % count, 0),
            connections.recv([arrived], (device - 1) % count, 0),
        ]
        for work in works:
            work.wait()

    turns = {EXCHANGE: lambda: exchange.run(dtype=torch.float32), PLAIN: plain}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(form.repetitions + 1):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            group.all_reduce(torch.zeros(1))
            began = time.perf_counter()
            turns[name]()
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            seconds[name].append(float(group.all_reduce_max(took)))
    for tiles in target.values():
        assert all(bool((tile.view == (device - 1) % count).all()) for tile in tiles)
    return Result(count, dim, message.nbytes, {name: each[1:] for name, each in seconds.items()})


def measure(form: Form) -> list[Result]:
    settings = LaunchSettings(Transport(), num_threads=1)
    return [launch(rank, form, dim, num_devices=size, settings=settings)[0] for size in form.sizes for dim in (0, 1)]


def page(form: Form, results: Sequence[Result]) -> list[str]:
    lines = [
        "# Moving parts of a model",
        "",
        f"Each process sends {form.megabytes} MB of {form.num_parameters} parameters to its neighbour, by an exchange "
        f"and as one plain message of gloo in turn, {form.repetitions} times.",
        "",
        "| processes | divided by | bytes a second, exchange / plain | target | MB a second of each process, plain |",
        "|---|---|---|---|---|",
    ]
    for each in results:
        plain = min(each.seconds[PLAIN])
        lines.append(
            f"| {each.num_devices} | {('rows', 'columns')[each.dim]} | {each.ratio} | "
            f"{verdict(each.ratio.median, at_least=AT_LEAST)} | {each.sent_bytes / plain / 1e6:.0f} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> list[Result]:
    options = parse_arguments(__doc__, argv)
    load_before = os.getloadavg()[0]
    form = QUICK if options.quick else Form()
    results = measure(form)
    lines = [*page(form, results), "", surroundings("reshard", load_before=load_before)]
    publish("reshard", lines, raw=[asdict(each) for each in results], options=options)
    return results


if __name__ == "__main__":
    main()
