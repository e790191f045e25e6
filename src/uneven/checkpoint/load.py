"""Read a divided model from a plain Hugging Face folder: each rank its own slices, never a whole model.

A slice along dim 0 is one run of bytes, along another dim one run for each row. Runs are read by `pread` and by
nothing else, so the bytes counted are the bytes asked of the system. A disk reads whole pages (4 KiB on Linux) and
ahead of what was asked, so rows that are cut may well be read whole from it, once for all ranks of a host.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import final

import torch
from transformers import PreTrainedModel

from uneven.errors import ModelError
from uneven.layout import ModelLayout
from uneven.modelspec import BytesRead, Piece, StoredTensor, assemble, pieces_of, read_stored

DTYPES = MappingProxyType({"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})


def load_model(model: PreTrainedModel, layout: ModelLayout, *, folder: Path, device: int) -> BytesRead:
    """Fill a model divided by `parallelize` with what `device` holds of the weights in `folder`, in the model's dtype.

    Returns what was read: headers, and this device's share. Holds, beside the model, one slice of one parameter.
    Communicates nothing. Raises ModelError, naming file and parameter, where the folder has not this model.
    """
    stored = read_stored(folder)
    assembly = assemble(layout.structure, stored)
    parameters = dict(model.named_parameters())
    with _Reader() as reader, torch.no_grad():
        for spec, sources in assembly.sources.items():
            ranges = layout.spec_ranges(spec, device)
            for source in sources:
                for piece in pieces_of(source, spec, ranges=ranges):
                    found = reader.read(stored.tensors[source.name], piece)
                    parameters[spec.name][_index(piece)].copy_(found)
        for spec, copy in assembly.copies.items():
            for piece in pieces_of(copy, spec, ranges=layout.spec_ranges(spec, device)):
                part = parameters[spec.name][_index(piece)]
                if not torch.equal(part, reader.read(stored.tensors[copy.name], piece).to(part)):
                    raise ModelError(
                        f"{stored.where}: {copy.name} differs from {spec.name}, but the configuration ties them "
                        f"(tie_word_embeddings)"
                    )
        for name in assembly.buffers:
            _fill_buffer(model, name, tensor=stored.tensors[name], reader=reader)
        return BytesRead(stored.header_bytes, reader.num_bytes)


def _index(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in piece.region)


def _fill_buffer(model: PreTrainedModel, name: str, *, tensor: StoredTensor, reader: "_Reader") -> None:
    buffer = dict(model.named_buffers()).get(name)
    if buffer is None or tuple(buffer.shape) != tensor.shape:
        needed = "no such buffer" if buffer is None else tuple(buffer.shape)
        raise ModelError(f"{tensor.file}: {name} has shape {tensor.shape}, the model has {needed}")
    buffer.copy_(reader.read(tensor, Piece(0, (0, tensor.shape[0]), ())))


@final
class _Reader:
    """Reads pieces of stored tensors, and counts the bytes. Files stay open until the end."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._descriptors: dict[Path, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, tensor: StoredTensor, piece: Piece) -> torch.Tensor:
        """The elements of a piece, in the dtype on disk."""
        runs = list(_runs(tensor, piece))
        content = torch.empty(sum(size for _, size in runs), dtype=torch.uint8)
        view, done = memoryview(content.numpy()), 0
        try:
            descriptor = self._descriptor(tensor.file)
            for offset, size in runs:
                _read_into(view[done : done + size], descriptor, offset=tensor.offset + offset)
                done += size
        except OSError as error:
            raise ModelError(f"{tensor.file}: can't read weights: {error.strerror}") from None
        self.num_bytes += done
        start, stop = piece.elements
        shape = (*tensor.shape[: piece.dim], stop - start, *tensor.shape[piece.dim + 1 :])
        return content.view(DTYPES[tensor.dtype]).view(shape)

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
            self._stack.callback(os.close, self._descriptors[file])
        return self._descriptors[file]


def _runs(tensor: StoredTensor, piece: Piece) -> Iterator[tuple[int, int]]:
    """Runs of bytes that a piece consists of: where each starts in the tensor's data, and its size."""
    start, stop = piece.elements
    num_rows = prod(tensor.shape[: piece.dim])
    row_bytes = tensor.num_bytes // num_rows
    element_bytes = row_bytes // tensor.shape[piece.dim]
    if (stop - start) * element_bytes == row_bytes:
        yield 0, tensor.num_bytes
        return
    for row in range(num_rows):
        yield row * row_bytes + start * element_bytes, (stop - start) * element_bytes


def _read_into(target: memoryview, descriptor: int, *, offset: int) -> None:
    """Fill `target`; the system may give less than asked, at most 2 GiB at a time."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise OSError(0, "it became shorter while it was read")
        done += count
