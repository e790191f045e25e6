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
from uneven.layout import Interval, ModelStructure, ParameterSpec
from uneven.modelspec.stored import ITEM_BYTES

FORMAT = "uneven.checkpoint/1"
BLOCK_BYTES = 1 << 16
"""What has one checksum: small beside a share of a parameter, and large beside the eight digits that it adds."""
CHECKSUM_DIGITS = 8
FACTS = ("step", "num_updates", "tokens", "time_s", "seed", "dtype", "config", "buffers", "extra")
"""Fields of a manifest that are JSON as they are."""


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
    buffers: Mapping[str, Sequence[int]]
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
        facts = json.loads(json.dumps({name: getattr(self, name) for name in FACTS}))  # all keys are texts, then
        body = {
            "format": FORMAT,
            **facts,
            "fingerprint": self.structure.fingerprint(),
            "model": self.structure.to_json(),
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
            structure, parts = ModelStructure.from_json(body["model"]), tuple(map(_part_from_json, body["parts"]))
            return cls(structure=structure, parts=parts, **{name: body[name] for name in FACTS})
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            kind = "" if isinstance(error, InputError) else f"malformed manifest ({type(error).__name__}): "
            raise CheckpointRefused(f"{where}: {kind}{error}") from None
        except CheckpointError as error:
            raise CheckpointRefused(f"{where}: {error}") from None

    def check_model(self, structure: ModelStructure, *, where: Path) -> None:
        """Raise CheckpointRefused, with the first parameter that differs, unless this is the state of such a model."""
        own, other = ({spec.name: spec for spec in each.parameters} for each in (self.structure, structure))
        for name in (*other, *own):
            found, needed = _describe(own.get(name)), _describe(other.get(name))
            if found != needed:
                raise CheckpointRefused(f"{where}: is of another model: {name} is {found} there, {needed} in the job")


def _describe(spec: ParameterSpec | None) -> str:
    """All of a parameter that slices depend on."""
    if spec is None:
        return "absent"
    return f"of shape {list(spec.shape)}, {list(matrix_shape(spec))} as a matrix"


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
