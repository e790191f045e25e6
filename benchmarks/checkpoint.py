"""How fast a rank writes and reads its part of a checkpoint, beside the plain calls to the system.

    .venv/bin/python -m benchmarks.checkpoint --write

The same bytes are written, with fsync, by `write_part` and by `write` alone, and read, from the page cache, by
`read_tiles`, which checks them, and by `pread` alone, in turn, in one thread. Parameters are divided along dim 0, or
along dim 1, where columns are written as rows. The last table has the checksums of Python's standard library.
"""

import hashlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.report import parse_arguments, publish, ratio, spread, surroundings
from uneven.checkpoint.folder import Checkpoint
from uneven.checkpoint.manifest import BLOCK_BYTES
from uneven.checkpoint.restore import read_tiles
from uneven.checkpoint.write import copy_tiles, write_part
from uneven.reshard import Tile

DIMS = {"dim 0": 0, "dim 1": 1}
SHAPE = (2048, 4096)
NUM_TENSORS, REPETITIONS = 16, 9
CHECKSUMS: dict[str, Callable[[bytes], object]] = {
    "CRC-32": zlib.crc32,
    "Adler-32": zlib.adler32,
    "BLAKE2b": lambda data: hashlib.blake2b(data).digest(),
    "SHA-256": lambda data: hashlib.sha256(data).digest(),
}

Rates = dict[str, list[float]]
"""GB/s by what was done, one a repetition."""


def rate(num_bytes: int, action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return num_bytes / 1e9 / (time.perf_counter() - began)


def plain_write(tensors: Iterable[torch.Tensor], file: Path) -> None:
    with file.open("xb", buffering=0) as stream:
        for tensor in tensors:
            content = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            while content:
                content = content[stream.write(content) :]
        os.fsync(stream.fileno())


def plain_read(file: Path, buffer: bytearray) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def measure(dim: int, *, num_tensors: int, repetitions: int) -> Rates:
    torch.set_num_threads(1)
    tiles = {f"{index}": (Tile(0, SHAPE[dim], dim, torch.randn(SHAPE)),) for index in range(num_tensors)}
    tensors = [tile.view for (tile,) in tiles.values()]
    written = dict.fromkeys(tiles, ((0, SHAPE[dim]),))
    num_bytes = 4 * num_tensors * SHAPE[0] * SHAPE[1]
    rates: Rates = {name: [] for name in ("copy", "write", "plain write", "read", "plain read")}
    buffer = bytearray(4 * SHAPE[0] * SHAPE[1])
    with tempfile.TemporaryDirectory() as folder:
        ours, plain = Path(folder, "ours"), Path(folder, "plain")
        for _ in range(repetitions):
            began = time.perf_counter()
            copy = copy_tiles([("value", tiles)], written)
            rates["copy"].append(num_bytes / 1e9 / (time.perf_counter() - began))
            parts = []
            rates["write"].append(rate(num_bytes, lambda: parts.append(write_part(copy, ours))))  # noqa: B023
            rates["plain write"].append(rate(num_bytes, lambda: plain_write(tensors, plain)))
            checkpoint = Checkpoint(Path(folder), SimpleNamespace(parts=parts))
            rates["read"].append(rate(num_bytes, lambda: read_tiles(checkpoint, [("value", tiles)])))  # noqa: B023
            rates["plain read"].append(rate(num_bytes, lambda: plain_read(plain, buffer)))
            ours.unlink()
            plain.unlink()
    return rates


def checksum_rates(repetitions: int) -> Rates:
    block = os.urandom(BLOCK_BYTES)
    return {
        name: [rate(400 * BLOCK_BYTES, lambda: [checksum(block) for _ in range(400)]) for _ in range(repetitions)]  # noqa: B023
        for name, checksum in CHECKSUMS.items()
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Rates]:
    options = parse_arguments(__doc__, argv)
    load_before = os.getloadavg()[0]
    num_tensors, repetitions = (1, 1) if options.quick else (NUM_TENSORS, REPETITIONS)
    found = {name: measure(dim, num_tensors=num_tensors, repetitions=repetitions) for name, dim in DIMS.items()}
    found["checksums"] = checksum_rates(repetitions)
    num_bytes = 4 * num_tensors * SHAPE[0] * SHAPE[1]
    lines = [
        "# Writing and reading a part of a checkpoint",
        "",
        f"{num_bytes / 1e6:,.0f} MB in fp32, {repetitions} repetitions in turn, one thread. Writing ends with fsync; "
        "reading is from the page cache.",
        "",
        "| divided along | GB/s of the copy | written | by `write` alone | read and checked | by `pread` alone |",
        "|---|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(str(spread(each)) for each in found[name].values())} |" for name in DIMS),
        "",
        "Ratios of what was done in turn: "
        + "; ".join(
            f"{name}, written {ratio(found[name]['write'], found[name]['plain write'])} and read "
            f"{ratio(found[name]['read'], found[name]['plain read'])} times as fast as by the system's calls alone"
            for name in DIMS
        )
        + ".",
        "",
        f"| checksum of {BLOCK_BYTES // 1024} KiB | GB/s |",
        "|---|---|",
        *(f"| {name} | {spread(each)} |" for name, each in found["checksums"].items()),
        "",
        surroundings("checkpoint", load_before=load_before),
    ]
    publish("checkpoint", lines, raw=found, options=options)
    return found


if __name__ == "__main__":
    main()
