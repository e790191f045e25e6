"""Read a checkpoint into any layout: each rank the blocks that its own slices touch, each of them checked.

A device's columns are one run of bytes of a tensor on disk. It is read from the start of its first block to the end
of its last one, so what is read is a rank's share and at most two blocks of 64 KiB for each run.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from uneven.checkpoint.folder import Checkpoint
from uneven.checkpoint.manifest import BLOCK_BYTES, CHECKSUM_DIGITS, Stored
from uneven.checkpoint.reader import DTYPES, FileReader
from uneven.checkpoint.slices import Slice
from uneven.errors import CheckpointRefused
from uneven.layout import Interval
from uneven.modelspec import BytesRead


@torch.no_grad()
def read_slices(checkpoint: Checkpoint, wanted: Iterable[tuple[Slice, torch.Tensor]]) -> BytesRead:
    """Fill tensors, of the shape (rows, columns) of their slice, in their own dtype; they may be views.

    One is filled before the next is asked for. Returns the bytes read, the manifest's as `headers`. Holds, beside the
    targets, one run of one tensor. Communicates nothing. Raises CheckpointRefused, with the file, for a byte that is
    not as it was written.
    """
    places: defaultdict[tuple[str, str], list[tuple[str, Stored]]] = defaultdict(list)
    for part in checkpoint.manifest.parts:
        for stored in part.tensors:
            places[stored.slice.name, stored.slice.kind].append((part.file, stored))
    with FileReader() as files:
        for each, target in wanted:
            if tuple(target.shape) != each.shape:
                raise CheckpointRefused(f"{each} has shape {each.shape}, its target {tuple(target.shape)}")
            num_left = each.num_elements
            for name, stored in places[each.name, each.kind]:
                rows, columns = _common(each.rows, stored.slice.rows), _common(each.columns, stored.slice.columns)
                if rows and columns:
                    found = _read_columns(files, checkpoint.folder / name, stored=stored, columns=columns)
                    region = target[_within(rows, each.rows), _within(columns, each.columns)]
                    region.copy_(found[_within(rows, stored.slice.rows)])
                    num_left -= region.numel()
            if num_left:
                raise CheckpointRefused(f"{checkpoint.folder}: lacks {num_left:,} elements of {each}")
        return BytesRead(checkpoint.manifest_bytes, files.num_bytes)


def _read_columns(files: FileReader, file: Path, *, stored: Stored, columns: Interval) -> torch.Tensor:
    """Some columns of a stored slice, in the dtype on disk; gone when the next are read."""
    num_columns, num_rows = columns[1] - columns[0], stored.slice.shape[0]
    column_bytes = stored.num_bytes // stored.slice.shape[1]
    start, stop = ((column - stored.slice.columns[0]) * column_bytes for column in columns)
    first = start - start % BLOCK_BYTES
    last = min(stop + -stop % BLOCK_BYTES, stored.num_bytes)
    content = files.scratch(last - first)
    view = memoryview(content.numpy())
    try:
        files.read_into(view, file, offset=stored.offset + first)
    except OSError as error:
        raise CheckpointRefused(f"{file}: can't read the checkpoint: {error.strerror}") from None
    for block, (found, needed) in enumerate(_checksums(view, stored, first=first)):
        if found != needed:
            at = stored.offset + first + block * BLOCK_BYTES
            raise CheckpointRefused(
                f"{file}: is damaged: the {BLOCK_BYTES:,} bytes from byte {at:,} on, in {stored.slice.name} "
                f"({stored.slice.kind}), have the checksum {found}, the manifest says {needed}"
            )
    numbers = content[start - first : stop - first].view(DTYPES[stored.dtype])
    # One row is not transposed: torch would do it at 0.3 GB/s, where it copies 1.2.
    return numbers.view(1, -1) if num_rows == 1 else numbers.view(num_columns, num_rows).t()


def _checksums(content: memoryview, stored: Stored, *, first: int) -> Iterator[tuple[str, str]]:
    """Of each block of `content`, which starts at byte `first` of a tensor: the checksum found, and the needed one."""
    for start in range(0, len(content), BLOCK_BYTES):
        digit = (first + start) // BLOCK_BYTES * CHECKSUM_DIGITS
        found = f"{zlib.crc32(content[start : start + BLOCK_BYTES]):08x}"
        yield found, stored.checksums[digit : digit + CHECKSUM_DIGITS]


def _common(one: Interval, other: Interval) -> Interval | None:
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else None


def _within(interval: Interval, outer: Interval) -> slice:
    return slice(interval[0] - outer[0], interval[1] - outer[0])
