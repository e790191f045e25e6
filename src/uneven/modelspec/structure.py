"""From a family and its settings to every parameter of a model, with the axis that divides it."""

from dataclasses import dataclass
from typing import Literal

from uneven.errors import ModelError
from uneven.layout import Band, LogicalAxis, ModelStructure, ParameterSpec, Replicate, Shard
from uneven.layout.model import Init
from uneven.modelspec.families import Attention, Family, FeedForward
from uneven.modelspec.settings import Settings

HEAD = "lm_head"

ExpertDivision = Literal["width", "whole"]
"""Experts are divided in their channels, each device holding a part of every expert; or each has one device."""


def experts_of(structure: ModelStructure) -> dict[str, ExpertDivision]:
    """Each module of stacked experts, and how it is divided."""
    return {
        module: "whole" if axis.name == "experts" else "width"
        for module, axis in structure.axes.items()
        if module.endswith(".experts")
    }


def block_size(size: int) -> int:
    """Elements in a unit of an axis of `size`: the largest power of two up to 128 that leaves at least 64 units."""
    block = 1
    while block < 128 and size // (2 * block) >= 64:
        block *= 2
    return block


def build_structure(
    name: str, family: Family, *, settings: Settings, experts: ExpertDivision | None = None
) -> ModelStructure:
    """Every parameter of the stock model. `experts` matters to mixtures of experts only; by default `width` where
    that is possible. Raises ModelError."""
    is_interleaved = family.experts is not None and family.experts.is_interleaved
    if is_interleaved and experts == "width":
        raise ModelError(
            f"{settings.where}: experts of {name} have biases and can't be divided by width; "
            "found experts = 'width', needed is 'whole'"
        )
    division = experts or ("whole" if is_interleaved else "width")
    builder = _Builder(family, settings, division, {}, [])
    builder.add_all()
    return ModelStructure(name, builder.axes, tuple(builder.parameters))


def is_sparse(family: Family, settings: Settings, *, layer: int) -> bool:
    """Whether a layer has experts."""
    if family.experts is None or family.feed_forward is None:
        return family.experts is not None
    num_dense = 0 if settings.get("first_k_dense_replace") is None else settings.size("first_k_dense_replace", least=0)
    every = 1 if settings.get("decoder_sparse_step") is None else settings.size("decoder_sparse_step")
    is_listed = layer in (settings.get("mlp_only_layers") or ())
    return layer >= num_dense and not is_listed and (layer + 1) % every == 0


def _norm(name: str, size: int, *, grad: Literal["copied", "partial"] = "copied", init: Init = "ones") -> ParameterSpec:
    return ParameterSpec(name, (size,), Replicate(grad), init)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Collects axes and parameters, in about the order of registration."""

    family: Family
    settings: Settings
    division: ExpertDivision
    axes: dict[str, LogicalAxis]
    parameters: list[ParameterSpec]

    @property
    def hidden(self) -> int:
        return self.settings.size("hidden_size")

    def add_all(self) -> None:
        family, settings = self.family, self.settings
        self._table(f"{family.body}.{family.embedding}")
        for layer in range(settings.size("num_hidden_layers")):
            prefix = f"{family.body}.layers.{layer}"
            self._attention(f"{prefix}.{family.attention.module}", family.attention)
            if is_sparse(family, settings, layer=layer):
                self._experts(f"{prefix}.mlp")
            elif family.feed_forward is not None:
                width = settings.size("intermediate_size")
                self._feed_forward(f"{prefix}.mlp", family.feed_forward, width=width)
            for norm in family.norms:
                self._layer_norm(f"{prefix}.{norm}")
        self._layer_norm(f"{family.body}.{family.final_norm}")
        if not settings.flag("tie_word_embeddings"):
            self._table(HEAD)
            if family.head_bias:
                bias = self._column(HEAD, self._channels(self.axes[HEAD]))
                self._add(f"{HEAD}.bias", (self.axes[HEAD].size,), placed=bias, init="zeros")

    def _add(self, name: str, shape: tuple[int, ...], *, placed: Shard | Replicate, init: Init) -> None:
        self.parameters.append(ParameterSpec(name, shape, placed, init))

    def _column(self, module: str, *bands: Band) -> Shard:
        return Shard(0, module, bands)

    def _channels(self, axis: LogicalAxis, *, offset: int = 0) -> Band:
        return Band(offset, axis.size, axis.unit_size)

    def _table(self, module: str) -> None:
        vocab = self.settings.size("vocab_size")
        axis = self.axes[module] = LogicalAxis("vocab", vocab, block_size(vocab))
        self._add(
            f"{module}.weight", (vocab, self.hidden), placed=self._column(module, self._channels(axis)), init="normal"
        )

    def _layer_norm(self, module: str) -> None:
        self.parameters.append(_norm(f"{module}.weight", self.hidden, init=self.family.norm_init))
        if self.family.norm_bias:
            self._add(f"{module}.bias", (self.hidden,), placed=Replicate("copied"), init="zeros")

    def _linear(self, module: str, shape: tuple[int, int], *, placed: Shard | Replicate, bias: bool) -> None:
        self._add(f"{module}.weight", shape, placed=placed, init="normal")
        if bias:
            # Of a row-parallel projection the bias is added once, after the sum, on every device.
            is_row = isinstance(placed, Shard) and placed.dim == 1
            self._add(f"{module}.bias", shape[:1], placed=Replicate("copied") if is_row else placed, init="zeros")

    def _attention(self, module: str, attention: Attention) -> None:
        settings = self.settings
        self.axes[module] = LogicalAxis("heads", settings.num_heads)
        if attention.has_sinks:
            self._add(f"{module}.sinks", (settings.num_heads,), placed=self._heads(module, 1), init="normal")
        if attention.kind == "latent":
            value_dim = self._latent_projections(module, attention)
        else:
            value_dim = self._projections(module, attention)
        out_width = settings.num_heads * value_dim
        rows = Shard(1, module, (Band(0, out_width, value_dim),))
        out_bias = settings.flag(attention.out_bias)
        self._linear(f"{module}.{attention.out}", (self.hidden, out_width), placed=rows, bias=out_bias)

    def _heads(self, module: str, width: int) -> Shard:
        """One block of `width` elements for each query head."""
        return self._column(module, Band(0, self.settings.num_heads * width, width))

    def _projections(self, module: str, attention: Attention) -> int:
        """Those to queries, keys and values; returns the width of a head."""
        settings, hidden = self.settings, self.hidden
        head_dim = settings.even_head_dim if attention.kind == "fused" else settings.head_dim
        has_bias = settings.flag(attention.qkv_bias)
        num_kv_heads = settings.num_heads if attention.kind == "fused" else settings.num_kv_heads
        query_width, kv_width = settings.num_heads * head_dim, num_kv_heads * head_dim
        group = settings.num_heads // num_kv_heads
        query, key = Band(0, query_width, head_dim), Band(0, kv_width, head_dim, group)
        if attention.kind == "fused":
            fused = self._heads(module, 3 * head_dim)
            self._linear(f"{module}.query_key_value", (3 * query_width, hidden), placed=fused, bias=has_bias)
        elif attention.kind == "packed":
            bands = (query, *(Band(query_width + i * kv_width, kv_width, head_dim, group) for i in (0, 1)))
            packed = self._column(module, *bands)
            self._linear(f"{module}.qkv_proj", (query_width + 2 * kv_width, hidden), placed=packed, bias=has_bias)
        else:
            for projection, width, band in (("q", query_width, query), ("k", kv_width, key), ("v", kv_width, key)):
                column = self._column(module, band)
                self._linear(f"{module}.{projection}_proj", (width, hidden), placed=column, bias=has_bias)
        if attention.norms != "none" and settings.flag(attention.norms_if):
            for norm, width, band in zip(attention.norm_names, (query_width, kv_width), (query, key), strict=True):
                self._query_key_norm(f"{module}.{norm}", attention, width=head_dim, placed=(width, module, band))
        return head_dim

    def _query_key_norm(self, module: str, attention: Attention, *, width: int, placed: tuple[int, str, Band]) -> None:
        full_width, divided, band = placed
        if attention.norms == "full_width":
            self._add(f"{module}.weight", (full_width,), placed=self._column(divided, band), init="ones")
            return
        # One weight serves all heads, and each device sees its own heads only: the gradients add up.
        self.parameters.append(_norm(f"{module}.weight", width, grad="partial", init=self.family.norm_init))
        if attention.norm_bias:
            self._add(f"{module}.bias", (width,), placed=Replicate("partial"), init="zeros")

    def _latent_projections(self, module: str, attention: Attention) -> int:
        """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1); returns the width of a value.

        Every device computes the latents, and uses them for its own heads only: their gradients add up.
        """
        settings, hidden = self.settings, self.hidden
        if settings.num_kv_heads != settings.num_heads:
            raise ModelError(
                f"{settings.where}: num_key_value_heads is {settings.num_kv_heads}; latent attention needs as many "
                f"as num_attention_heads, {settings.num_heads}"
            )
        rope, nope = settings.size("qk_rope_head_dim"), settings.size("qk_nope_head_dim")
        value, latent = settings.size("v_head_dim"), settings.size("kv_lora_rank")
        has_bias, num_heads = settings.flag(attention.qkv_bias), settings.num_heads
        queries = self._heads(module, rope + nope)
        partial = Replicate("partial")
        if settings.get("q_lora_rank") is None:
            self._linear(f"{module}.q_proj", (num_heads * (rope + nope), hidden), placed=queries, bias=False)
        else:
            rank = settings.size("q_lora_rank")
            self._linear(f"{module}.q_a_proj", (rank, hidden), placed=partial, bias=has_bias)
            self.parameters.append(_norm(f"{module}.q_a_layernorm.weight", rank, grad="partial"))
            self._linear(f"{module}.q_b_proj", (num_heads * (rope + nope), rank), placed=queries, bias=False)
        self._linear(f"{module}.kv_a_proj_with_mqa", (latent + rope, hidden), placed=partial, bias=has_bias)
        self.parameters.append(_norm(f"{module}.kv_a_layernorm.weight", latent, grad="partial"))
        keys_values = self._heads(module, nope + value)
        self._linear(f"{module}.kv_b_proj", (num_heads * (nope + value), latent), placed=keys_values, bias=False)
        return value

    def _feed_forward(self, module: str, feed_forward: FeedForward, *, width: int) -> None:
        axis = self.axes[module] = LogicalAxis("mlp", width, block_size(width))
        bias = self.settings.flag(feed_forward.bias)
        bands = [self._channels(axis)]
        if feed_forward.is_packed:
            bands.append(self._channels(axis, offset=width))
        for projection in feed_forward.columns:
            column = self._column(module, *bands)
            self._linear(f"{module}.{projection}", (len(bands) * width, self.hidden), placed=column, bias=bias)
        rows = Shard(1, module, (self._channels(axis),))
        self._linear(f"{module}.{feed_forward.row}", (self.hidden, width), placed=rows, bias=bias)

    def _experts(self, module: str) -> None:
        experts = self.family.experts
        assert experts is not None
        num, width = self.settings.size(self.settings.present(experts.num)), self.settings.size(experts.width)
        hidden = self.hidden
        self._add(f"{module}.{experts.router}.weight", (num, hidden), placed=Replicate("copied"), init="normal")
        if experts.router_bias:
            self._add(f"{module}.{experts.router}.bias", (num,), placed=Replicate("copied"), init="normal")
        stack = f"{module}.experts"
        if self.division == "whole":
            axis = self.axes[stack] = LogicalAxis("experts", num)
            columns = rows = Shard(0, stack, (self._channels(axis),))
        else:
            axis = self.axes[stack] = LogicalAxis("mlp", width, block_size(width))
            columns = Shard(1, stack, (self._channels(axis), self._channels(axis, offset=width)))
            rows = Shard(2, stack, (self._channels(axis),))
        if experts.is_interleaved:
            self._add(f"{stack}.gate_up_proj", (num, hidden, 2 * width), placed=columns, init="normal")
            self._add(f"{stack}.gate_up_proj_bias", (num, 2 * width), placed=columns, init="zeros")
            self._add(f"{stack}.down_proj", (num, width, hidden), placed=rows, init="normal")
            self._add(f"{stack}.down_proj_bias", (num, hidden), placed=rows, init="zeros")
        else:
            self._add(f"{stack}.gate_up_proj", (num, 2 * width, hidden), placed=columns, init="normal")
            self._add(f"{stack}.down_proj", (num, hidden, width), placed=rows, init="normal")
        if experts.num_shared is not None and self.settings.size(experts.num_shared, least=0):
            shared_width = width * self.settings.size(experts.num_shared)
            self._feed_forward(f"{module}.shared_experts", FeedForward(), width=shared_width)
