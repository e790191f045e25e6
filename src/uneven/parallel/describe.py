"""A model's structure from transformers' own tensor-parallel plan of its family, for families without a table entry.

The plan names projections as column- or row-parallel; shapes come from the model on the meta device. What the plan
leaves open is refused by name and never guessed: an unknown style, a parameter inside a divided module that nobody
placed, an embedding of a kind of its own.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from uneven.errors import ModelError
from uneven.layout import Band, LogicalAxis, ModelStructure, ParameterSpec, Placement, Replicate, Shard
from uneven.layout.model import Init
from uneven.modelspec.structure import block_size
from uneven.parallel.build import build_stock

Style = Literal["colwise", "rowwise", "replicated_with_grad_allreduce"]
IGNORED = ("embedding_rowwise",)
"""Embeddings are divided whether the plan says so or not."""


def describe_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ModelStructure]:
    """A parsed `config.json` with the defaults of its class in transformers, and the structure of its model."""
    model = build_stock(config, dtype=torch.float32)
    full = model.config.to_dict()
    return {**full, **config}, describe(model)


def describe(model: PreTrainedModel) -> ModelStructure:
    """The structure of a stock model, by its configuration's `base_model_tp_plan`. Raises ModelError."""
    family = model.config.model_type
    styles = _styles(model, family)
    placements: dict[str, Placement] = {}
    axes: dict[str, LogicalAxis] = {}
    _place_vocab(model, axes=axes, placements=placements)
    by_parent: defaultdict[str, dict[str, Style]] = defaultdict(dict)
    for module, style in styles.items():
        parent, _, name = module.rpartition(".")
        by_parent[parent][name] = style
    for parent, children in by_parent.items():
        axes[parent], placed = _divide(model, parent, children=children)
        placements |= placed
    parameters = tuple(
        ParameterSpec(
            name,
            tuple(parameter.shape),
            placements.get(name, Replicate("copied")),
            _init(model, name, parameter=parameter),
        )
        for name, parameter in model.named_parameters()
    )
    return ModelStructure(family, axes, parameters)


def _styles(model: PreTrainedModel, family: str) -> dict[str, Style]:
    """The style of each module that the plan names."""
    plan: Mapping[str, str] | None = getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        raise ModelError(
            f"the family {family!r} has no base_model_tp_plan in transformers, so nothing says how to divide it"
        )
    known = (*get_args(Style), *IGNORED)
    for pattern, style in plan.items():
        if style not in known:
            raise ModelError(f"the plan of the family {family!r} divides {pattern} as {style!r}; known are {known}")
    found: dict[str, Style] = {}
    for name, _ in model.named_modules():
        path = re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix(f"{model.base_model_prefix}."))
        if plan.get(path, IGNORED[0]) not in IGNORED:
            found[name] = plan[path]
    return found


def _place_vocab(model: PreTrainedModel, *, axes: dict[str, LogicalAxis], placements: dict[str, Placement]) -> None:
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no embedding and head of a usual kind")
    if type(embedding) is not nn.Embedding and not hasattr(embedding, "scalar_embed_scale"):
        raise ModelError(
            f"the embedding of {type(model).__name__} is a {type(embedding).__name__}, which is not understood"
        )
    vocab = embedding.num_embeddings
    for module in (embedding,) if head.weight is embedding.weight else (embedding, head):
        name = names[module]
        axes[name] = LogicalAxis("vocab", vocab, block_size(vocab))
        for key, _ in module.named_parameters():
            placements[f"{name}.{key}"] = Shard(0, name, (Band(0, vocab, block_size(vocab)),))


def _divide(
    model: PreTrainedModel, parent: str, *, children: Mapping[str, Style]
) -> tuple[LogicalAxis, dict[str, Placement]]:
    """The axis of one module, and where its parameters lie."""
    module = model.get_submodule(parent)
    widths = {name: module.get_submodule(name).out_features for name, style in children.items() if style == "colwise"}
    rows = [name for name, style in children.items() if style == "rowwise"]
    if not widths or len(rows) != 1:
        raise ModelError(f"{parent}: the plan has the column-parallel {list(widths)} and the row-parallel {rows}")
    width = module.get_submodule(rows[0]).in_features
    if "q_proj" in widths:
        axis, bands = _heads(model, module, widths=widths, name=parent)
    elif set(widths.values()) == {width}:
        axis = LogicalAxis("mlp", width, block_size(width))
        bands = {name: Band(0, width, axis.unit_size) for name in widths}
    else:
        raise ModelError(f"{parent}: column-parallel widths {widths} before a row-parallel one of {width}")
    placements: dict[str, Placement] = {}
    for name, _ in module.named_parameters():
        child, _, key = name.rpartition(".")
        style = children.get(child)
        if style == "colwise":
            placements[f"{parent}.{name}"] = Shard(0, parent, (bands[child],))
        elif style == "rowwise":
            row = Shard(1, parent, (Band(0, width, axis.unit_size * width // axis.size),))
            placements[f"{parent}.{name}"] = row if key == "weight" else Replicate("copied")
        elif style == "replicated_with_grad_allreduce":
            placements[f"{parent}.{name}"] = Replicate("partial")
        else:
            raise ModelError(f"{parent}.{name}: a parameter of a divided module that the plan does not place")
    return axis, placements


def _heads(
    model: PreTrainedModel, module: nn.Module, *, widths: Mapping[str, int], name: str
) -> tuple[LogicalAxis, dict[str, Band]]:
    num_heads = model.config.num_attention_heads
    head_dim, rest = divmod(widths["q_proj"], num_heads)
    kv_width = widths.get("k_proj", 0)
    num_kv_heads = kv_width // head_dim if head_dim else 0
    if rest or set(widths) != {"q_proj", "k_proj", "v_proj"} or widths["v_proj"] != kv_width or not num_kv_heads:
        raise ModelError(f"{name}: projections of widths {dict(widths)} for {num_heads} heads are not understood")
    group = num_heads // num_kv_heads
    if num_heads % num_kv_heads or getattr(module, "num_key_value_groups", group) != group:
        raise ModelError(f"{name}: {num_heads} query heads on {num_kv_heads} key-value heads are not understood")
    key = Band(0, kv_width, head_dim, group)
    return LogicalAxis("heads", num_heads), {
        "q_proj": Band(0, widths["q_proj"], head_dim),
        "k_proj": key,
        "v_proj": key,
    }


def _init(model: PreTrainedModel, name: str, *, parameter: torch.Tensor) -> Init:
    """How transformers starts a parameter: matrices normal; a vector as the family's own rule leaves it."""
    module = model.get_submodule(name.rpartition(".")[0])
    if parameter.ndim > 1 or isinstance(module, nn.Linear):
        return "normal" if parameter.ndim > 1 else "zeros"
    sample = deepcopy(module).to_empty(device="cpu", recurse=False)
    model._init_weights(sample)
    found = {float(value) for value in getattr(sample, name.rpartition(".")[2]).detach().unique()}
    inits: dict[frozenset[float], Init] = {frozenset({0.0}): "zeros", frozenset({1.0}): "ones"}
    return inits.get(frozenset(found), "normal")
