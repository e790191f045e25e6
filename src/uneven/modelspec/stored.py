"""Weights on disk, by the headers of their safetensors files: which tensors there are, and at which bytes.

A file is 8 bytes that give the length of a JSON header, the header, and raw little-endian data. Headers are small, so
a launcher checks a folder of any size in moments, and a rank then reads only the bytes that it needs. Loads no torch.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from uneven.errors import ModelError

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
ITEM_BYTES: Mapping[str, int] = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2})
"""The kinds of numbers that become parameters."""
LONGEST_HEADER = 100_000_000
"""Bytes that safetensors allows."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its data are `num_bytes` from byte `offset` on, rows first."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The tensors of a folder by name. `where` names it in errors, `header_bytes` were read to learn all this."""

    where: Path
    tensors: Mapping[str, StoredTensor]
    header_bytes: int


@dataclass(frozen=True, slots=True)
class BytesRead:
    """What one rank has asked the disk for: headers and index, and data of tensors."""

    headers: int
    tensors: int


def read_stored(folder: Path) -> StoredWeights:
    """What `model.safetensors`, or else the files that `model.safetensors.index.json` names, hold.

    Raises ModelError, naming the file: absent, cut short, or not what it should be.
    """
    single, index = folder / WEIGHTS, folder / WEIGHTS_INDEX
    if single.is_file() or not index.is_file():
        tensors, num_bytes = _read_header(single)
        return StoredWeights(single, tensors, num_bytes)
    places = _read_index(index)
    total = index.stat().st_size
    found: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(set(places.values())):
        found[name], num_bytes = _read_header(folder / name)
        total += num_bytes
    for name, file in places.items():
        if name not in found[file]:
            raise ModelError(f"{index}: places {name} in {file}, which holds no such tensor")
    return StoredWeights(index, {name: found[file][name] for name, file in places.items()}, total)


def _read_index(index: Path) -> Mapping[str, str]:
    """The file of each tensor: plain names of files in the same folder."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = set(places.values())
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: malformed index ({type(error).__name__}: {error})") from None
    for file in files:
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
            raise ModelError(f"{index}: expected the name of a file in the same folder, found {file!r}")
    return dict(places)


def _read_header(file: Path) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of one file, and how many bytes were read."""
    try:
        with file.open("rb", buffering=0) as stream:
            header, length = _parse_header(stream, file=file)
    except OSError as error:
        raise ModelError(f"{file}: can't read weights: {error.strerror}") from None
    tensors = dict(_tensors(header, start=8 + length, file=file))
    needed = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=8 + length)
    size = file.stat().st_size
    if size != needed:
        raise ModelError(f"{file}: has {size:,} bytes, its header describes {needed:,}; the file is damaged")
    return tensors, 8 + length


def _parse_header(stream: IO[bytes], *, file: Path) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(stream.read(8), "little")
    if length > LONGEST_HEADER:
        raise ModelError(f"{file}: not a safetensors file: a header of {length:,} bytes is too long")
    content = stream.read(length)
    if len(content) < length or length == 0:
        raise ModelError(f"{file}: the header has {len(content):,} of {length:,} bytes; the file is damaged")
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not a safetensors file: its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{file}: not a safetensors file: its header is a JSON {type(header).__name__}")
    return header, length


def _tensors(header: Mapping[str, Any], *, start: int, file: Path) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
            is_sound = 0 <= first <= last and all(type(n) is int and n >= 0 for n in (*shape, first, last))
            if dtype in ITEM_BYTES:
                is_sound = is_sound and prod(shape) * ITEM_BYTES[dtype] == last - first
        except (LookupError, TypeError, ValueError):
            is_sound = False
        if not is_sound:
            raise ModelError(f"{file}: malformed entry of {name} in its header: {entry!r}")
        yield name, StoredTensor(file, dtype, shape, start + first, last - first)
