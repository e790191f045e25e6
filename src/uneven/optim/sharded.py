"""The optimizer of a divided model: its state divided between the replicas, and kept by several of them.

An update needs no communication, since every element's gradient is already the sum over all replicas; all who keep
a shard update it, to the same bits. Then whoever holds elements of a shard without keeping it receives them. Both
work in the reducer's buffers, where an element's new value takes the place of its gradient.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import nn

from uneven.comm import World
from uneven.errors import ModelError
from uneven.layout import Copies, Members, ParallelPlan, StateShard, bundles_of, shards_of
from uneven.optim.adamw import AdamW, Strip
from uneven.optim.bundle import EndToEnd, LocalBundle
from uneven.optim.gather import ParameterGather

Flats = Mapping[Members, Sequence[torch.Tensor]]
"""For each set of members that this rank is in, flat tensors that are its bundle end to end."""
BATCH_ELEMENTS = 1 << 22
"""What one call updates, at least: few calls, with temporary tensors of 16 MiB."""


@final
class ShardState:
    """A shard's state where it is kept, flat: moments, master weights of bf16 parameters, and the shard's own step."""

    def __init__(self, shard: StateShard, bundle: LocalBundle, *, dtype: torch.dtype) -> None:
        """The start, from the elements of `shard` in `bundle`; `dtype` is the model's."""
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        self.shard = shard
        self.step = 0
        self.exp_avg = torch.zeros(shard.num_elements, dtype=precision, device=bundle.device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.master = None if dtype == precision else bundle.read(shard.start, shard.stop, dtype=precision)

    @property
    def num_bytes(self) -> int:
        kept = (self.exp_avg, self.exp_avg_sq, self.master)
        return sum(tensor.numel() * tensor.element_size() for tensor in kept if tensor is not None)


@final
class ShardedOptimizer:
    """AdamW in fp32 (fp64 for a model in fp64). A bf16 parameter has an fp32 master, that is updated, then rounded.

    Weights of two or more dimensions decay; biases and norms do not. Constructed and called by every rank. With
    `copies` of at least the number of replicas, or "all", everyone keeps everything and nothing is sent.
    """

    def __init__(
        self, model: nn.Module, plan: ParallelPlan, *, world: World, rule: AdamW | None = None, copies: Copies = 2
    ) -> None:
        parameters: dict[str, torch.Tensor] = {name: p.detach() for name, p in model.named_parameters()}
        shards = shards_of(plan, copies)
        layout = plan.layout_of(world.device)
        self._rule = rule or AdamW()
        self._dtype = _common_dtype(parameters)
        self._bundles = {
            members: LocalBundle(entries, parameters, layout=layout, device=world.device)
            for members, entries in bundles_of(plan).items()
            if world.device in members
        }
        self.states = tuple(
            ShardState(shard, self._bundles[shard.members], dtype=self._dtype)
            for shard in shards
            if world.device in shard.holders
        )
        self._gather = ParameterGather(shards, world)

    def step(self, gradients: Flats, *, lr: float) -> None:
        """Update every parameter by its gradient (`Gradients.by_members`), at learning rate `lr`; uses them up."""
        self.update(gradients, lr=lr)
        self.gather(gradients)

    @torch.no_grad()
    def update(self, gradients: Flats, *, lr: float) -> None:
        """The part without communication: new values for all that is kept here, in the place of its gradients."""
        for batch in _batches(self._strips(gradients)):
            self._rule.update(batch, lr=lr)
            for strip in batch:
                strip.gradient.copy_(strip.values)
        for state in self.states:
            state.step += 1

    @torch.no_grad()
    def gather(self, values: Flats) -> None:
        """The other part: receive the new values of all that is kept elsewhere, and change the model's parameters."""
        flats = {members: EndToEnd(values[members]) for members in self._bundles}
        self._gather.run(flats, dtype=self._dtype)
        for members, bundle in self._bundles.items():
            bundle.write(flats[members])

    def _strips(self, gradients: Flats) -> Iterator[Strip]:
        flats = {members: EndToEnd(gradients[members]) for members in self._bundles}
        for state in self.states:
            shard, bundle = state.shard, self._bundles[state.shard.members]
            for (start, stop), decays in bundle.runs(shard.start, shard.stop):
                for gradient in flats[shard.members].cut(start, stop):
                    end = start + gradient.numel()
                    own = slice(start - shard.start, end - shard.start)
                    master = state.master
                    values = bundle.read(start, end, dtype=self._dtype) if master is None else master[own]
                    yield Strip(values, gradient, state.exp_avg[own], state.exp_avg_sq[own], state.step, decays)
                    start = end


def _batches(strips: Iterable[Strip]) -> Iterator[list[Strip]]:
    batch: list[Strip] = []
    size = 0
    for strip in strips:
        batch.append(strip)
        size += strip.values.numel()
        if size >= BATCH_ELEMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _common_dtype(parameters: dict[str, torch.Tensor]) -> torch.dtype:
    by_dtype = {parameter.dtype: name for name, parameter in parameters.items()}
    if len(by_dtype) > 1:
        found = ", ".join(f"{dtype} ({name})" for dtype, name in by_dtype.items())
        raise ModelError(f"the optimizer needs a model whose parameters have one dtype, found {found}")
    return next(iter(by_dtype))
