"""Read a checkpoint into any layout: each rank the blocks that its own tiles touch, each of them checked.

A tile is one run of bytes of a tensor on disk. It is read from the start of its first block to the end of its last
one, so what is read is a rank's share and at most two blocks of 64 KiB for each run.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from uneven.checkpoint.folder import Checkpoint
from uneven.checkpoint.manifest import BLOCK_BYTES, CHECKSUM_DIGITS, Stored, checksums_of
from uneven.checkpoint.reader import DTYPES, FileReader
from uneven.errors import CheckpointRefused
from uneven.layout import Interval
from uneven.modelspec.stored import ITEM_BYTES
from uneven.reshard import Tiles


@torch.no_grad()
def read_tiles(checkpoint: Checkpoint, state: Iterable[tuple[str, Tiles]]) -> int:
    """Fill tiles by kind, in their own dtype; of a model that the manifest was checked for (`check_model`).

    Some are filled before the next are asked for. Returns the bytes read from files of tensors. Holds, beside the
    targets, one run of one tensor. Communicates nothing. Raises CheckpointRefused, with the file, for a byte that is
    not as it was written.
    """
    places: defaultdict[tuple[str, str], list[tuple[Path, Stored]]] = defaultdict(list)
    for part in checkpoint.manifest.parts:
        for stored in part.tensors:
            places[stored.slice.name, stored.slice.kind].append((checkpoint.folder / part.file, stored))
    with FileReader() as files:
        for kind, tiles in state:
            for name, tile in ((name, tile) for name, own in tiles.items() for tile in own):
                num_left = tile.stop - tile.start
                for file, stored in places[name, kind]:
                    start, stop = max(tile.start, stored.slice.start), min(tile.stop, stored.slice.stop)
                    if start < stop:
                        target = tile.part(start, stop)
                        shape = target.movedim(tile.dim, 0).shape
                        found = _read(files, file, stored=stored, span=(start, stop), width=shape[1:].numel())
                        # Moved in the source: torch transposes at 0.8 GB/s then, and at 0.4 in the target.
                        target.copy_(found.view(shape).movedim(0, tile.dim))
                        num_left -= stop - start
                if num_left:
                    raise CheckpointRefused(
                        f"{checkpoint.folder}: lacks {num_left:,} of {tile.start} to {tile.stop} of {name} ({kind})"
                    )
        return files.num_bytes


def _read(files: FileReader, file: Path, *, stored: Stored, span: Interval, width: int) -> torch.Tensor:
    """`span` of a slice, flat, `width` elements for each, in the dtype on disk; gone when the next are read."""
    one, bytes_each = stored.slice, width * ITEM_BYTES[stored.dtype]
    start, stop, end = ((at - one.start) * bytes_each for at in (*span, one.stop))
    first, last = start - start % BLOCK_BYTES, min(stop + -stop % BLOCK_BYTES, end)
    content = files.scratch(last - first)
    view = memoryview(content.numpy())
    try:
        files.read_into(view, file, offset=stored.offset + first)
    except OSError as error:
        raise CheckpointRefused(f"{file}: can't read the checkpoint: {error.strerror}") from None
    digit = first // BLOCK_BYTES * CHECKSUM_DIGITS
    found = checksums_of(view)
    if found != stored.checksums[digit : digit + len(found)]:
        where = f"bytes {stored.offset + first:,} to {stored.offset + last:,}, in {one.name} ({one.kind}),"
        raise CheckpointRefused(f"{file}: is damaged: {where} don't have the checksums that the manifest says")
    return content[start - first : stop - first].view(DTYPES[stored.dtype])
