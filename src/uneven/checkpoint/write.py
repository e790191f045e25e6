"""Write a device's part of a checkpoint: a copy into memory while the job waits, and a file while it goes on.

A file is one of safetensors. Its tensors lie column after column, so that whatever columns another layout needs
are one run of bytes, also of a parameter that is divided along a later dim.
"""

import json
import os
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, final

import torch

from uneven.checkpoint.folder import writing
from uneven.checkpoint.manifest import BLOCK_BYTES, Part, Stored
from uneven.checkpoint.slices import Slice
from uneven.errors import CheckpointError
from uneven.modelspec.stored import ITEM_BYTES

NAMES = MappingProxyType({torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"})
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Slices and their numbers at one moment, in the CPU's memory."""

    slices: tuple[Slice, ...]
    tensors: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


@torch.no_grad()
def copy_slices(slices: Iterable[tuple[Slice, torch.Tensor]]) -> HostCopy:
    """Copy tensors, of the shape (rows, columns) of their slice, so that they may change once this returns."""
    found, copies, devices = [], [], set()
    for each, tensor in slices:
        if tuple(tensor.shape) != each.shape:
            raise CheckpointError(f"{each} has shape {each.shape}, found a tensor of shape {tuple(tensor.shape)}")
        host = torch.empty(each.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies.append(host.copy_(tensor, non_blocking=tensor.is_cuda))
        found.append(each)
        if tensor.is_cuda:
            devices.add(tensor.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return HostCopy(tuple(found), tuple(copies))


def write_part(copy: HostCopy, file: Path) -> Part:
    """Write `file` and see it to the disk; returns what the manifest says of it. Raises CheckpointError."""
    header, offsets = _header(copy)
    with writing(file), file.open("xb", buffering=0) as stream:
        _write(stream, memoryview(header))
        checksums = [_write_tensor(stream, tensor) for tensor in copy.tensors]
        os.fsync(stream.fileno())
    stored = tuple(
        Stored(each, NAMES[tensor.dtype], len(header) + offset, sums)
        for each, tensor, offset, sums in zip(copy.slices, copy.tensors, offsets, checksums, strict=True)
    )
    return Part(file.name, len(header) + copy.num_bytes, stored)


def _header(copy: HostCopy) -> tuple[bytes, list[int]]:
    """The header of a safetensors file, and where after it the data of each tensor start."""
    entries, offsets, end = {}, [], 0
    for each, tensor in zip(copy.slices, copy.tensors, strict=True):
        offsets.append(end)
        dtype = NAMES[tensor.dtype]
        start, end = end, end + each.num_elements * ITEM_BYTES[dtype]
        rows, columns = ("{}:{}".format(*interval) for interval in (each.rows, each.columns))
        name = f"{each.name}/{each.kind}/{rows}/{columns}"
        entries[name] = {"dtype": dtype, "shape": [*reversed(each.shape)], "data_offsets": [start, end]}
    content = json.dumps(entries).encode()
    content += b" " * (-len(content) % ALIGNMENT)
    return len(content).to_bytes(8, "little") + content, offsets


def _write_tensor(stream: IO[bytes], tensor: torch.Tensor) -> str:
    """Write the columns of a tensor one after another; returns the checksums of their blocks."""
    content = memoryview(tensor.t().contiguous().view(-1).view(torch.uint8).numpy())
    _write(stream, content)
    blocks = range(0, len(content), BLOCK_BYTES)
    return "".join(f"{zlib.crc32(content[start : start + BLOCK_BYTES]):08x}" for start in blocks)


def _write(stream: IO[bytes], content: memoryview) -> None:
    """All of `content`; the system may take less than it is given, at most 2 GiB at a time."""
    done = 0
    while done < len(content):
        done += stream.write(content[done:])


@final
class Writer:
    """Writes one part at a time in a thread. Its process may end while it does: then there is a draft, nothing else."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._results: list[Part | Exception] = []

    @property
    def is_busy(self) -> bool:
        """Whether a part was submitted and its result was not taken."""
        return self._thread is not None

    def submit(self, copy: HostCopy, file: Path) -> None:
        """Start to write. Raises CheckpointError while another part `is_busy`."""
        if self.is_busy:
            raise CheckpointError(f"{file}: another part is still being written; skip this save, or wait")
        self._thread = threading.Thread(target=self._run, args=(copy, file), name="checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> Part | None:
        """The part that has been written, once; None while there is none. Raises what writing raised."""
        return self.wait(0.0) if self._results else None

    def wait(self, timeout_s: float) -> Part | None:
        """As `poll`, waiting for a part that is being written. Raises CheckpointError if it takes longer."""
        if self._thread is None:
            return None
        self._thread.join(timeout_s if not self._results else None)
        if not self._results:
            raise CheckpointError(f"a part of a checkpoint was not written within {timeout_s:g} s")
        self._thread = None
        result = self._results.pop()
        if isinstance(result, Exception):
            raise result
        return result

    def _run(self, copy: HostCopy, file: Path) -> None:
        try:
            self._results.append(write_part(copy, file))
        except Exception as error:  # whatever it is, it is the caller's to hear
            self._results.append(error)
