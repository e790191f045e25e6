"""What a checkpoint says of itself: the job at one step, and which file holds which elements, checked by arithmetic.

Each element of each kind is in exactly one file. The bytes of a tensor have a checksum for every block of 64 KiB,
so a part of it can be read and still be checked, at the price of at most two blocks. Loads no torch.
"""

import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
from pathlib import Path
from typing import Any

from uneven.errors import CheckpointError, CheckpointRefused, InputError
from uneven.layout import Interval, ModelStructure, ParameterSpec

VALUE, BUFFER = "value", "buffer"
STATE = (VALUE, "exp_avg", "exp_avg_sq")
"""The trained state of an element: its fp32 master, or the parameter where there is none; AdamW's moments.

The kind `BUFFER` is what belongs to a model without being trained, seen as flat.
"""
FORMAT = "uneven.checkpoint/1"
BLOCK_BYTES = 1 << 16
"""What has one checksum: small beside a share of a parameter, and large beside the eight digits that it adds."""
CHECKSUM_DIGITS = 8
FACTS = ("step", "num_updates", "tokens", "time_s", "seed", "dtype", "config", "buffers", "extra")
"""Fields of a manifest that are JSON as they are."""


def checksums_of(content: memoryview) -> str:
    """CRC-32 of each block, in hex."""
    return "".join(f"{zlib.crc32(content[i : i + BLOCK_BYTES]):08x}" for i in range(0, len(content), BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class Slice:
    """One kind of number of a parameter's elements `start` to `stop` along its `dim`."""

    name: str
    kind: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A slice in a file, from byte `offset` on, the parameter's `dim` first; with the checksums of its blocks."""

    slice: Slice
    dtype: str
    offset: int
    checksums: str


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a checkpoint: its name, size and tensors."""

    file: str
    num_bytes: int
    tensors: tuple[Stored, ...]

    def __post_init__(self) -> None:
        if self.file in ("", ".", "..") or Path(self.file).name != self.file:
            raise CheckpointError(f"expected the name of a file in the checkpoint's folder, found {self.file!r}")

    def to_json(self) -> dict[str, Any]:
        tensors = [[*astuple(t.slice), t.dtype, t.offset, t.checksums] for t in self.tensors]
        return {"file": self.file, "num_bytes": self.num_bytes, "tensors": tensors}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "Part":
        tensors = (Stored(Slice(*each[:4]), *each[4:]) for each in entry["tensors"])
        return cls(entry["file"], entry["num_bytes"], tuple(tensors))


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
        found: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for each in (stored.slice for part in self.parts for stored in part.tensors):
            found[each.name, each.kind].append((each.start, each.stop))
        needed = {(spec.name, kind): spec.shape[spec.dim] for spec in self.structure.parameters for kind in STATE}
        needed |= {(name, BUFFER): prod(shape) for name, shape in self.buffers.items()}
        for key, size in needed.items():
            _check_cover(found.pop(key, []), what="{} ({})".format(*key), size=size)
        if found:
            raise CheckpointError("its files hold {} ({}), which the model of its manifest lacks".format(*min(found)))

    def dumps(self) -> str:
        """JSON with a digest of the rest."""
        facts = json.loads(json.dumps({name: getattr(self, name) for name in FACTS}))  # all keys are texts, then
        body = {
            "format": FORMAT,
            **facts,
            "fingerprint": self.structure.fingerprint(),
            "model": self.structure.to_json(),
            "parts": [part.to_json() for part in self.parts],
        }
        return json.dumps(body | {"digest": _digest(body)})

    @classmethod
    def loads(cls, text: str | bytes, *, where: str) -> "Manifest":
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
            structure, parts = ModelStructure.from_json(body["model"]), tuple(map(Part.from_json, body["parts"]))
            return cls(structure=structure, parts=parts, **{name: body[name] for name in FACTS})
        except (CheckpointError, InputError) as error:
            raise CheckpointRefused(f"{where}: {error}") from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointRefused(f"{where}: malformed manifest ({type(error).__name__}): {error}") from None

    def check_model(self, structure: ModelStructure, *, where: Path) -> None:
        """Raise CheckpointRefused, with the first parameter that differs, unless this is the state of such a model."""
        own, other = ({spec.name: _describe(spec) for spec in each.parameters} for each in (self.structure, structure))
        for name in (*other, *own):
            found, needed = own.get(name, "absent"), other.get(name, "absent")
            if found != needed:
                raise CheckpointRefused(f"{where}: is of another model: {name} is {found} there, {needed} in the job")


def _describe(spec: ParameterSpec) -> str:
    """All of a parameter that slices depend on."""
    return f"of shape {list(spec.shape)} divided along dim {spec.dim}"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _check_cover(intervals: Sequence[Interval], *, what: str, size: int) -> None:
    """Raise CheckpointError unless `intervals` are 0 to `size`, each once."""
    end = 0
    for start, stop in [*sorted(intervals), (size, size)]:
        if start != end:
            problem = "in none of its files" if end < start else "in its files more than once, or beyond its end"
            raise CheckpointError(f"{min(start, end)} to {max(start, end)} of {what}, which has {size}, are {problem}")
        end = stop
