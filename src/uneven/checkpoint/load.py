"""Read a divided model from a plain Hugging Face folder: each rank its own slices, never a whole model.

A slice along dim 0 is one run of bytes, along another dim one run for each row. A disk reads whole pages (4 KiB on
Linux) and ahead of what was asked, so rows that are cut may well be read whole from it, once for all ranks of a host.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from transformers import PreTrainedModel

from uneven.checkpoint.reader import DTYPES, FileReader
from uneven.errors import ModelError
from uneven.layout import ModelLayout
from uneven.modelspec import BytesRead, Piece, StoredTensor, assemble, pieces_of, read_stored


def load_model(model: PreTrainedModel, layout: ModelLayout, *, folder: Path, device: int) -> BytesRead:
    """Fill a model divided by `parallelize` with what `device` holds of the weights in `folder`, in the model's dtype.

    Returns what was read: headers, and this device's share. Holds, beside the model, one slice of one parameter.
    Communicates nothing. Raises ModelError, naming file and parameter, where the folder has not this model.
    """
    stored = read_stored(folder)
    assembly = assemble(layout.structure, stored)
    parameters = dict(model.named_parameters())
    with FileReader() as files, torch.no_grad():
        for spec, sources in assembly.sources.items():
            ranges = layout.spec_ranges(spec, device)
            for source in sources:
                for piece in pieces_of(source, spec, ranges=ranges):
                    # Without a name, so that it is gone before the next one is read.
                    parameters[spec.name][_index(piece)].copy_(_read(files, stored.tensors[source.name], piece=piece))
        for spec, copy in assembly.copies.items():
            for piece in pieces_of(copy, spec, ranges=layout.spec_ranges(spec, device)):
                part = parameters[spec.name][_index(piece)]
                if not torch.equal(part, _read(files, stored.tensors[copy.name], piece=piece).to(part)):
                    raise ModelError(
                        f"{stored.where}: {copy.name} differs from {spec.name}, but the configuration ties them "
                        f"(tie_word_embeddings)"
                    )
        for name in assembly.buffers:
            _fill_buffer(model, name, tensor=stored.tensors[name], files=files)
        return BytesRead(stored.header_bytes, files.num_bytes)


def _index(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in piece.region)


def _fill_buffer(model: PreTrainedModel, name: str, *, tensor: StoredTensor, files: FileReader) -> None:
    buffer = dict(model.named_buffers()).get(name)
    if buffer is None or tuple(buffer.shape) != tensor.shape:
        needed = "no such buffer" if buffer is None else tuple(buffer.shape)
        raise ModelError(f"{tensor.file}: {name} has shape {tensor.shape}, the model has {needed}")
    buffer.copy_(_read(files, tensor, piece=Piece(0, (0, tensor.shape[0]), ())))


def _read(files: FileReader, tensor: StoredTensor, *, piece: Piece) -> torch.Tensor:
    """The elements of a piece, in the dtype on disk."""
    runs = list(_runs(tensor, piece))
    content = torch.empty(sum(size for _, size in runs), dtype=torch.uint8)
    view, done = memoryview(content.numpy()), 0
    try:
        for offset, size in runs:
            files.read_into(view[done : done + size], tensor.file, offset=tensor.offset + offset)
            done += size
    except OSError as error:
        raise ModelError(f"{tensor.file}: can't read weights: {error.strerror}") from None
    start, stop = piece.elements
    shape = (*tensor.shape[: piece.dim], stop - start, *tensor.shape[piece.dim + 1 :])
    return content.view(DTYPES[tensor.dtype]).view(shape)


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
