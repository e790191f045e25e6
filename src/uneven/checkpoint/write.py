"""Write a device's part of a checkpoint: a copy into memory while the job waits, and a file while it goes on.

A file is one of safetensors. Its tensors have the parameter's divided dim first, so that whatever slices another
layout needs are one run of bytes, also of a parameter that is divided along a later dim.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Thread
from typing import IO

import torch

from uneven.checkpoint.folder import writing
from uneven.checkpoint.manifest import Part, Slice, Stored, checksums_of
from uneven.checkpoint.reader import DTYPES
from uneven.layout import Holding, ParallelPlan, Ranges, StateShard, states_held, transfers
from uneven.reshard import Tiles, cut

DISK = -1  # in the place of a device

HostCopy = tuple[tuple[Slice, torch.Tensor], ...]
"""Slices at one moment, in the CPU's memory; each tensor has the parameter's `dim` first, as a view."""


def written_by(
    plan: ParallelPlan, shards: tuple[StateShard, ...], *, buffers: Mapping[str, Sequence[int]]
) -> dict[int, dict[str, Ranges]]:
    """What each device writes: each element one of its state's holders, the one with the least to write so far.

    Parameters go from large to small, so that shares come out alike. `buffers` (shapes) fall to the first device.
    """
    parameters = sorted(plan.structure.parameters, key=lambda spec: -spec.num_elements)
    structure = replace(plan.structure, parameters=tuple(parameters))
    disk = {DISK: {spec.name: spec.whole for spec in parameters}}
    found: dict[int, dict[str, Ranges]] = {device: {} for device in plan.devices}
    for move in transfers(states_held(plan, shards), disk, structure=structure):
        found[move.source][move.spec.name] = move.ranges
    found[plan.devices[0]] |= {name: ((0, prod(shape)),) for name, shape in buffers.items()}
    return found


@torch.no_grad()
def copy_tiles(state: Iterable[tuple[str, Tiles]], written: Holding) -> HostCopy:
    """Copy what is `written` by this device (`written_by`) of tiles by kind; they may change once this returns."""
    copies = []
    for kind, tiles in state:
        for name, own in tiles.items():
            for (start, stop), view in cut(own, written.get(name, ())):
                host = torch.empty(view.shape, dtype=view.dtype, pin_memory=view.is_cuda).copy_(view)
                copies.append((Slice(name, kind, start, stop), host.movedim(own[0].dim, 0)))
    return tuple(copies)


def write_part(copy: HostCopy, file: Path) -> Part:
    """Write `file` and see it to the disk; returns what the manifest says of it. Raises CheckpointError."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries, stored, end = {}, [], 0
    for each, tensor in copy:
        entry = {"dtype": names[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [end, end + tensor.nbytes]}
        entries[f"{each.name}/{each.kind}/{each.start}:{each.stop}"] = entry
        end += tensor.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    end = 8 + len(header)
    with writing(file), file.open("xb", buffering=0) as stream:
        _write(stream, memoryview(len(header).to_bytes(8, "little") + header))
        for each, tensor in copy:
            content = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            _write(stream, content)
            stored.append(Stored(each, names[tensor.dtype], end, checksums_of(content)))
            end += len(content)
        os.fsync(stream.fileno())
    return Part(file.name, end, tuple(stored))


def _write(stream: IO[bytes], content: memoryview) -> None:
    """All of `content`; the system may take less than it is given, at most 2 GiB at a time."""
    done = 0
    while done < len(content):
        done += stream.write(content[done:])


def start_writing(copy: HostCopy, file: Path) -> Future[Part]:
    """`write_part` in a thread. The process may end meanwhile, as it does not with an executor: a draft is left."""
    part: Future[Part] = Future()

    def run() -> None:
        try:
            part.set_result(write_part(copy, file))
        except Exception as error:  # whatever it is, it is the caller's to hear
            part.set_exception(error)

    Thread(target=run, name="checkpoint", daemon=True).start()
    return part
