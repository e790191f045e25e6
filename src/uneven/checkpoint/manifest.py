"""What a checkpoint says of itself: the job at one step, and which file holds which elements, checked by arithmetic.

Each element of each kind is in exactly one file. The bytes of a tensor have a checksum for every block of 64 KiB,
so a part of it can be read and still be checked, at the price of at most two blocks. Loads no torch.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from uneven.checkpoint.slices import BUFFER, STATE, Slice, matrix_shape
from uneven.errors import CheckpointError, CheckpointRefused, InputError
from uneven.layout import Interval, ModelStructure, Shard
from uneven.modelspec.stored import ITEM_BYTES

FORMAT = "uneven.checkpoint/1"
BLOCK_BYTES = 1 << 16
"""What has one checksum: small beside a share of a parameter, and large beside the eight digits that it adds."""
CHECKSUM_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """A slice in a file, column after column from byte `offset` on; `checksums` are CRC-32 of its blocks, in hex."""

    slice: Slice
    dtype: str
    offset: int
    checksums: str

    @property
    def num_bytes(self) -> int:
        return self.slice.num_elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a checkpoint: its name, size and tensors."""

    file: str
    num_bytes: int
    tensors: tuple[Stored, ...]

    def __post_init__(self) -> None:
        if self.file in ("", ".", "..") or Path(self.file).name != self.file:
            raise CheckpointError(f"expected the name of a file in the checkpoint's folder, found {self.file!r}")
        for stored in self.tensors:
            num_blocks = -(-stored.num_bytes // BLOCK_BYTES)
            is_inside = 0 <= stored.offset <= self.num_bytes - stored.num_bytes
            if not is_inside or len(stored.checksums) != CHECKSUM_DIGITS * num_blocks:
                raise CheckpointError(
                    f"{self.file} of {self.num_bytes:,} bytes: {stored.slice} of {stored.num_bytes:,} bytes at byte "
                    f"{stored.offset:,} with {len(stored.checksums)} digits of checksums can't be in it"
                )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint. `tokens` and `step` count what was committed, `num_updates` AdamW's updates.

    `buffers` are the shapes of what belongs to the model beside its parameters. `config` is the model's `config.json`,
    `dtype` the job's, as transformers names it. `extra` is the caller's, JSON: the place in the data, for one.
    """

    step: int
    num_updates: int
    tokens: int
    time_s: float
    seed: int
    dtype: str
    structure: ModelStructure
    config: Mapping[str, Any]
    parts: tuple[Part, ...]
    buffers: Mapping[str, tuple[int, ...]]
    extra: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Raise CheckpointError unless the files hold every element of the model once."""
        boxes: defaultdict[tuple[str, str], list[Slice]] = defaultdict(list)
        for part in self.parts:
            for stored in part.tensors:
                boxes[stored.slice.name, stored.slice.kind].append(stored.slice)
        for key, shape in self._shapes():
            _check_tiling(boxes.pop(key, []), key=key, shape=shape)
        if boxes:
            name, kind = min(boxes)
            raise CheckpointError(f"its files hold {name} ({kind}), which the model of its manifest lacks")

    def _shapes(self) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
        """Rows and columns of all that there has to be, by name and kind."""
        for spec in self.structure.parameters:
            yield from (((spec.name, kind), matrix_shape(spec)) for kind in STATE)
        yield from (((name, BUFFER), (1, prod(shape))) for name, shape in self.buffers.items())

    def dumps(self) -> str:
        """JSON with a digest of the rest."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "num_updates": self.num_updates,
            "tokens": self.tokens,
            "time_s": self.time_s,
            "seed": self.seed,
            "dtype": self.dtype,
            "fingerprint": self.structure.fingerprint(),
            "model": self.structure.to_json(),
            "config": dict(self.config),
            "buffers": {name: list(shape) for name, shape in self.buffers.items()},
            "extra": json.loads(json.dumps(dict(self.extra))),  # keys that aren't text would sort otherwise
            "parts": [_part_to_json(part) for part in self.parts],
        }
        return json.dumps(body | {"digest": _digest(body)})

    @classmethod
    def loads(cls, text: str, *, where: str) -> "Manifest":
        """What `dumps` wrote; `where` names the file in errors. Raises CheckpointRefused."""
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointRefused(f"{where}: not JSON: {error}") from None
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        if found != FORMAT:
            raise CheckpointRefused(f"{where}: expected format {FORMAT!r}, found {found!r}")
        digest = body.pop("digest", None)
        if digest != _digest(body):
            raise CheckpointRefused(f"{where}: its digest is {digest}, its content has {_digest(body)}; it is damaged")
        try:
            return cls(
                *(int(body[key]) for key in ("step", "num_updates", "tokens")),
                time_s=float(body["time_s"]),
                seed=int(body["seed"]),
                dtype=str(body["dtype"]),
                structure=ModelStructure.from_json(body["model"]),
                config=dict(body["config"]),
                parts=tuple(map(_part_from_json, body["parts"])),
                buffers={name: tuple(shape) for name, shape in body["buffers"].items()},
                extra=dict(body["extra"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            kind = "" if isinstance(error, InputError) else f"malformed manifest ({type(error).__name__}): "
            raise CheckpointRefused(f"{where}: {kind}{error}") from None
        except CheckpointError as error:
            raise CheckpointRefused(f"{where}: {error}") from None

    def check_model(self, structure: ModelStructure, *, where: Path) -> None:
        """Raise CheckpointRefused, with the first parameter that differs, unless this is the state of such a model."""
        own, other = self.structure, structure
        if own.family != other.family:
            raise CheckpointRefused(f"{where}: is of a {own.family} model, the job has a {other.family} model")
        mine, theirs = ({spec.name: spec for spec in each.parameters} for each in (own, other))
        for name in (*theirs, *mine):
            found, needed = mine.get(name), theirs.get(name)
            if found is None or needed is None:
                has, lacks = ("the job's model", "the checkpoint") if found is None else ("it", "the job's model")
                raise CheckpointRefused(f"{where}: of another model: {has} has {name}, which {lacks} lacks")
            if (found.shape, matrix_shape(found)) != (needed.shape, matrix_shape(needed)):
                raise CheckpointRefused(
                    f"{where}: of another model: {name} has shape {list(found.shape)} there, divided along "
                    f"{_dim(found.placement)}, and {list(needed.shape)} in the job, divided along "
                    f"{_dim(needed.placement)}"
                )


def _dim(placement: object) -> str:
    return f"dim {placement.dim}" if isinstance(placement, Shard) else "none"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _part_to_json(part: Part) -> dict[str, Any]:
    tensors = [
        [each.slice.name, each.slice.kind, each.slice.rows, each.slice.columns, each.dtype, each.offset, each.checksums]
        for each in part.tensors
    ]
    return {"file": part.file, "num_bytes": part.num_bytes, "tensors": tensors}


def _part_from_json(entry: Mapping[str, Any]) -> Part:
    tensors = tuple(
        Stored(Slice(name, kind, _interval(rows), _interval(columns)), dtype, offset, checksums)
        for name, kind, rows, columns, dtype, offset, checksums in entry["tensors"]
    )
    return Part(entry["file"], entry["num_bytes"], tensors)


def _interval(pair: Sequence[int]) -> Interval:
    start, stop = pair
    return int(start), int(stop)


def _check_tiling(boxes: Sequence[Slice], *, key: tuple[str, str], shape: tuple[int, int]) -> None:
    """Raise CheckpointError unless `boxes` cover a matrix of `shape` once."""
    num_rows, num_columns = shape
    cuts = sorted({0, num_rows, *(row for box in boxes for row in box.rows)})
    for low, high in pairwise(cuts):  # every box has all of these rows, or none
        end = 0
        for start, stop in [*sorted(b.columns for b in boxes if b.rows[0] <= low < b.rows[1]), (num_columns, None)]:
            if start != end or not (0 <= low < high <= num_rows):
                name, kind = key
                what = f"rows {low} to {high}, columns {min(start, end)} to {max(start, end)} of {name} ({kind})"
                found = "are in none of its files" if end < start else "are in its files more than once"
                raise CheckpointError(f"{what}, which has {num_rows} rows and {num_columns} columns, {found}")
            end = stop if stop is not None else end
