"""The families that are understood, and what each adds to the common decoder: biases, per-head norms, defaults.

A family that is not in the table is refused: a parameter that nobody described would be divided wrongly in silence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from uneven.errors import ModelError
from uneven.layout import Band, LogicalAxis, ModelStructure, ParameterSpec, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family departs from Llama. Biases are True, False, or the configuration key that decides."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool = False
    default_num_kv_heads: int | None = None
    default_head_dim: int | None = None


# Defaults are those of each family's configuration class in transformers 5.24 (models/*/configuration_*.py).
FAMILIES = MappingProxyType(
    {
        "llama": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
        "mistral": Family(default_num_kv_heads=8),
        "qwen2": Family(qkv_bias=True, default_num_kv_heads=32),
        "qwen3": Family(
            qkv_bias="attention_bias",
            out_bias="attention_bias",
            head_norms=True,
            default_num_kv_heads=32,
            default_head_dim=128,
        ),
    }
)

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder that decide its parameters, read from a `config.json`."""

    hidden: int
    mlp: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool
    is_tied: bool

    @property
    def group(self) -> int:
        """Query heads per key and value head."""
        return self.num_heads // self.num_kv_heads


def read_shape(config: Mapping[str, Any], *, where: str) -> tuple[str, DecoderShape]:
    """The family's name and sizes of a parsed `config.json`; `where` names the file in errors."""
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"{where}: the family {name!r} is not understood (its attention, projections and norms have no entry in "
            f"the table of families); supported are {known}"
        )
    family = FAMILIES[name]
    num_heads = _size(config, "num_attention_heads", where=where)
    num_kv_heads = num_heads
    if config.get("num_key_value_heads", family.default_num_kv_heads) is not None:
        num_kv_heads = _size(config, "num_key_value_heads", where=where, default=family.default_num_kv_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}"
        )
    return name, DecoderShape(
        hidden=_size(config, "hidden_size", where=where),
        mlp=_size(config, "intermediate_size", where=where),
        num_layers=_size(config, "num_hidden_layers", where=where),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, family, where=where),
        vocab=_size(config, "vocab_size", where=where),
        qkv_bias=_flag(config, family.qkv_bias, where=where),
        out_bias=_flag(config, family.out_bias, where=where),
        mlp_bias=_flag(config, family.mlp_bias, where=where),
        head_norms=family.head_norms,
        is_tied=_flag(config, "tie_word_embeddings", where=where),
    )


def _size(config: Mapping[str, Any], key: str, *, where: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if type(value) is not int or value < 1:
        raise ModelError(f"{where}: {key} must be a whole number of at least 1, found {value!r}")
    return value


def _head_dim(config: Mapping[str, Any], family: Family, *, where: str) -> int:
    """Width of a head; even, since rotary embeddings turn pairs of channels."""
    head_dim = config.get("head_dim", family.default_head_dim)
    if head_dim is None:
        hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
        if hidden % num_heads:
            raise ModelError(
                f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {num_heads}; set head_dim"
            )
        head_dim = hidden // num_heads
    else:
        head_dim = _size(config, "head_dim", where=where, default=family.default_head_dim)
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim must be even, for rotary embeddings, found {head_dim}")
    return int(head_dim)


def _flag(config: Mapping[str, Any], rule: bool | str, *, where: str) -> bool:
    value = rule if isinstance(rule, bool) else config.get(rule, False)
    if type(value) is not bool:
        raise ModelError(f"{where}: {rule} must be true or false, found {value!r}")
    return value


def block_size(size: int) -> int:
    """Elements in a unit of an axis of `size`: the largest power of two up to 128 that leaves at least 64 units."""
    block = 1
    while block < 128 and size // (2 * block) >= 64:
        block *= 2
    return block


def build_structure(family: str, shape: DecoderShape) -> ModelStructure:
    """Every parameter in the order in which the stock model registers them, with the axis that divides it."""
    vocab = LogicalAxis("vocab", shape.vocab, block_size(shape.vocab))
    heads = LogicalAxis("heads", shape.num_heads)
    mlp = LogicalAxis("mlp", shape.mlp, block_size(shape.mlp))
    axes = {EMBEDDING: vocab}
    for layer in range(shape.num_layers):
        axes[f"model.layers.{layer}.self_attn"] = heads
        axes[f"model.layers.{layer}.mlp"] = mlp
    if not shape.is_tied:
        axes[HEAD] = vocab
    return ModelStructure(family, axes, tuple(_parameters(shape, axes)))


def _parameters(shape: DecoderShape, axes: Mapping[str, LogicalAxis]) -> Iterator[ParameterSpec]:
    yield _table(EMBEDDING, shape, axis=axes[EMBEDDING])
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        yield from _attention(f"{prefix}.self_attn", shape)
        yield from _mlp(f"{prefix}.mlp", shape, unit_size=axes[f"{prefix}.mlp"].unit_size)
        yield _norm(f"{prefix}.input_layernorm.weight", shape.hidden)
        yield _norm(f"{prefix}.post_attention_layernorm.weight", shape.hidden)
    yield _norm("model.norm.weight", shape.hidden)
    if not shape.is_tied:
        yield _table(HEAD, shape, axis=axes[HEAD])


def _table(module: str, shape: DecoderShape, *, axis: LogicalAxis) -> ParameterSpec:
    placement = Shard(0, module, (Band(0, shape.vocab, axis.unit_size),))
    return ParameterSpec(f"{module}.weight", (shape.vocab, shape.hidden), placement, "normal")


def _norm(name: str, size: int, *, grad: Literal["copied", "partial"] = "copied") -> ParameterSpec:
    return ParameterSpec(name, (size,), Replicate(grad), "ones")


def _attention(module: str, shape: DecoderShape) -> Iterator[ParameterSpec]:
    query_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    query = Band(0, query_width, shape.head_dim)
    key_value = Band(0, kv_width, shape.head_dim, shape.group)
    for projection, width, band in (
        ("q", query_width, query),
        ("k", kv_width, key_value),
        ("v", kv_width, key_value),
    ):
        shard = Shard(0, module, (band,))
        yield ParameterSpec(f"{module}.{projection}_proj.weight", (width, shape.hidden), shard, "normal")
        if shape.qkv_bias:
            yield ParameterSpec(f"{module}.{projection}_proj.bias", (width,), shard, "zeros")
    rows = Shard(1, module, (query,))
    yield ParameterSpec(f"{module}.o_proj.weight", (shape.hidden, query_width), rows, "normal")
    if shape.out_bias:
        yield ParameterSpec(f"{module}.o_proj.bias", (shape.hidden,), Replicate("copied"), "zeros")
    if shape.head_norms:
        # One weight serves all heads, and each device sees its own heads only: the gradients add up.
        yield _norm(f"{module}.q_norm.weight", shape.head_dim, grad="partial")
        yield _norm(f"{module}.k_norm.weight", shape.head_dim, grad="partial")


def _mlp(module: str, shape: DecoderShape, *, unit_size: int) -> Iterator[ParameterSpec]:
    channels = (Band(0, shape.mlp, unit_size),)
    for projection in ("gate", "up"):
        yield ParameterSpec(
            f"{module}.{projection}_proj.weight",
            (shape.mlp, shape.hidden),
            Shard(0, module, channels),
            "normal",
        )
        if shape.mlp_bias:
            yield ParameterSpec(f"{module}.{projection}_proj.bias", (shape.mlp,), Shard(0, module, channels), "zeros")
    yield ParameterSpec(f"{module}.down_proj.weight", (shape.hidden, shape.mlp), Shard(1, module, channels), "normal")
    if shape.mlp_bias:
        yield ParameterSpec(f"{module}.down_proj.bias", (shape.hidden,), Replicate("copied"), "zeros")
