"""Which tensors on disk make up each parameter of a model.

Most parameters are one tensor of the same name. Stacked experts lie on disk one by one, files may lack the body's
prefix, and some names differ. A source says which region of the parameter a tensor fills, so a rank reads what falls
into its own part and nothing else. The names are those of transformers 5.24 (conversion_mapping.py).
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from uneven.errors import ModelError
from uneven.layout import Interval, ModelStructure, ParameterSpec, Shard
from uneven.modelspec.stored import ITEM_BYTES, StoredTensor, StoredWeights

HEAD_WEIGHT = "lm_head.weight"
EXPERTS = re.compile(r"(.+)\.mlp\.experts\.(gate_up_proj|down_proj)")
EXPERT_NAMES = (
    ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),  # Qwen3-MoE, DeepSeek-V3
    ("block_sparse_moe.experts", ("w1", "w3", "w2")),  # Mixtral
)
OTHER_NAMES = ((".mlp.gate.", ".block_sparse_moe.gate."), ("lm_head.", "embed_out."))
"""Parts of names in a model and what stands for them in files: Mixtral's router, GPT-NeoX's head."""
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attention\.(bias|masked_bias)$|(^|\.)position_ids$")
"""Constants that old files hold beside the weights, and that a model computes itself."""
STATE = re.compile(r"\.e_score_correction_bias$")
"""What is part of a model and no parameter of it: a buffer that steers DeepSeek's router."""
NEXT_TOKENS_LAYER = re.compile(r"(.*\.layers\.\d+\.)eh_proj\.weight")
"""The mark of a layer that predicts further tokens (DeepSeek-V3), which is not part of the model."""
WHOLE_EXPERTS = 3
"""Dimensions of stacked experts."""


@dataclass(frozen=True, slots=True)
class Source:
    """The tensor `name`, of `shape`, fills the region of a parameter that starts at `offset`.

    It may lack leading dimensions, in which the region then has a size of 1: one expert's matrix.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def region(self) -> tuple[Interval, ...]:
        """From where to where the tensor lies in the parameter, in each dimension."""
        sizes = (1,) * (len(self.offset) - len(self.shape)) + self.shape
        return tuple((start, start + size) for start, size in zip(self.offset, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of a stored tensor along `dim` that a device holds, and the region of its part that they fill."""

    dim: int
    elements: Interval
    region: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Assembly:
    """The sources of every parameter, and the names of buffers that belong to the model.

    `copies` are further tensors that must equal a parameter: a tied head.
    """

    sources: Mapping[ParameterSpec, tuple[Source, ...]]
    copies: Mapping[ParameterSpec, Source]
    buffers: tuple[str, ...]


def assemble(structure: ModelStructure, stored: StoredWeights) -> Assembly:
    """Where the parameters of a model come from.

    Raises ModelError, naming file and tensor, if one is missing, has another shape, can't become a parameter, or is
    no part of the model.
    """
    names = stored.tensors.keys()
    tied = _tied_table(structure)
    sources = {
        spec: sources_of(spec, names, aliases=(HEAD_WEIGHT,) if spec == tied else ()) for spec in structure.parameters
    }
    copies = {}
    if tied is not None and HEAD_WEIGHT in names and sources[tied][0].name != HEAD_WEIGHT:
        copies[tied] = _whole(tied, HEAD_WEIGHT)
    beyond = _layers_beyond(names)
    buffers = [name for name in names if STATE.search(name) and not name.startswith(beyond)]
    needed = [
        *(source for found in sources.values() for source in found),
        *copies.values(),
        *(Source(name, (), stored.tensors[name].shape) for name in buffers),
    ]
    _refuse_other_model([source.name for source in needed], stored)
    for source in needed:
        _check(stored.tensors[source.name], source)
    return Assembly(sources, copies, tuple(buffers))


def sources_of(spec: ParameterSpec, names: Collection[str], *, aliases: tuple[str, ...] = ()) -> tuple[Source, ...]:
    """The tensors among `names` that fill a parameter; `aliases` are further names for all of it.

    Where not all of them are there, the way of storing it of which most is there.
    """
    ways = [*_ways(spec), *((_whole(spec, alias),) for alias in aliases)]
    return max(ways, key=lambda way: sum(source.name in names for source in way) / len(way))


def pieces_of(source: Source, spec: ParameterSpec, *, ranges: Sequence[Interval] | None) -> Iterator[Piece]:
    """What a device reads of a source; `ranges` are the elements that it holds of the parameter, None for all."""
    dim = spec.placement.dim if ranges is not None and isinstance(spec.placement, Shard) else 0
    first, last = source.region[dim]
    dim_on_disk = dim - (len(source.offset) - len(source.shape))
    num_before = 0
    for start, stop in ((0, spec.shape[0]),) if ranges is None else ranges:
        low, high = max(start, first), min(stop, last)
        if low < high:
            filled = (num_before + low - start, num_before + high - start)
            region = (*source.region[:dim], filled, *source.region[dim + 1 :])
            if dim_on_disk < 0:  # this expert, whole
                yield Piece(0, (0, source.shape[0]), region)
            else:
                yield Piece(dim_on_disk, (low - first, high - first), region)
        num_before += stop - start


def _ways(spec: ParameterSpec) -> Iterator[tuple[Source, ...]]:
    """Every way in which a parameter may be stored, the likeliest first."""
    ways: list[tuple[Source, ...]] = [(_whole(spec, spec.name),)]
    for name, other in OTHER_NAMES:
        if name in spec.name:
            ways.append((_whole(spec, spec.name.replace(name, other)),))
    stacked = EXPERTS.fullmatch(spec.name)
    if stacked and len(spec.shape) == WHOLE_EXPERTS:
        for experts, projections in EXPERT_NAMES:
            ways.append(tuple(_experts(spec, f"{stacked[1]}.{experts}", projections=projections)))
    yield from ways
    for way in ways:  # of a base model, which has no head beside it and thus no prefix
        yield tuple(Source(source.name.partition(".")[2], source.offset, source.shape) for source in way)


def _whole(spec: ParameterSpec, name: str) -> Source:
    return Source(name, (0,) * len(spec.shape), spec.shape)


def _experts(spec: ParameterSpec, prefix: str, *, projections: tuple[str, str, str]) -> Iterator[Source]:
    """One source for each expert and projection; gate and up lie one after the other along dim 1."""
    gate, up, down = projections
    num_experts, rows, columns = spec.shape
    parts = (down,) if spec.name.endswith("down_proj") else (gate, up)
    for expert in range(num_experts):
        for index, part in enumerate(parts):
            shape = (rows // len(parts), columns)
            yield Source(f"{prefix}.{expert}.{part}.weight", (expert, index * shape[0], 0), shape)


def _tied_table(structure: ModelStructure) -> ParameterSpec | None:
    """The embedding, if it is the head as well; else None."""
    if any(spec.name == HEAD_WEIGHT for spec in structure.parameters):
        return None
    for spec in structure.parameters:
        if isinstance(spec.placement, Shard) and structure.axes[spec.placement.module].name == "vocab":
            return spec
    return None


def _refuse_other_model(needed: Sequence[str], stored: StoredWeights) -> None:
    """Refuse weights that are of another model: more or fewer tensors."""
    names, known = stored.tensors.keys(), frozenset(needed)
    beyond = _layers_beyond(names)
    missing = [name for name in needed if name not in names]
    unused = [n for n in names if not (n in known or BUFFERS.search(n) or n.startswith(beyond))]
    problems = []
    if missing:
        problems.append(f"the model needs {_list(missing)}, which the files lack")
    if unused:
        problems.append(f"the files hold {_list(unused)}, which the model lacks")
    if problems:
        raise ModelError(f"{stored.where}: not the weights of this model: {'; '.join(problems)}")


def _layers_beyond(names: Collection[str]) -> tuple[str, ...]:
    """Prefixes of layers that are stored with a model and no part of it."""
    return tuple(match[1] for match in map(NEXT_TOKENS_LAYER.fullmatch, names) if match)


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def _check(tensor: StoredTensor, source: Source) -> None:
    if tensor.dtype not in ITEM_BYTES:
        raise ModelError(
            f"{tensor.file}: {source.name} has dtype {tensor.dtype}; training needs plain floating-point weights, "
            f"one of {', '.join(ITEM_BYTES)}"
        )
    if tensor.shape != source.shape:
        raise ModelError(
            f"{tensor.file}: {source.name} has shape {tensor.shape}, the model's configuration says {source.shape}"
        )
