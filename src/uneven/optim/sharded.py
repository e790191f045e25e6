"""The optimizer of a divided model: its state divided between the replicas, and kept by several of them.

An update needs no communication, since every element's gradient is already the sum over all replicas; all who keep
a shard update it, to the same bits. Then whoever holds elements of a shard without keeping it receives them.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, final

import torch
from torch import nn

from uneven.comm import World
from uneven.errors import ModelError
from uneven.layout import Copies, ParallelPlan, StateShard, parameters_held, shards_of, states_held, transfers
from uneven.optim.adamw import AdamW, Strip
from uneven.reshard import Exchange, Tile, Tiles, copy_common, cut, flat_tiles, tiles_of

PURPOSE = "params"
BATCH_ELEMENTS = 1 << 22
"""What one call updates, at least: few calls, with temporary tensors of 16 MiB."""


@final
class ShardState:
    """A shard's state where it is kept, flat: moments, master weights of bf16 parameters, and the shard's own step."""

    def __init__(self, shard: StateShard, *, dtype: torch.dtype, torch_device: torch.device) -> None:
        """Zeros; `dtype` is the model's."""
        precision = precision_of(dtype)
        self.shard = shard
        self.step = 0
        self.exp_avg = torch.zeros(shard.num_elements, dtype=precision, device=torch_device)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.master = None if dtype == precision else torch.zeros_like(self.exp_avg)

    @property
    def kinds(self) -> dict[str, torch.Tensor]:
        """The flat tensors by what they are."""
        kinds = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "master": self.master}
        return {kind: flat for kind, flat in kinds.items() if flat is not None}

    @property
    def num_bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.kinds.values())


def precision_of(dtype: torch.dtype) -> torch.dtype:
    """That of the state of a model in `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Run(NamedTuple):
    """Consecutive elements of a shard whose gradients lie together; `values` are their places in the parameters."""

    state: ShardState
    own: slice
    gradient: torch.Tensor
    values: tuple[torch.Tensor, ...]


@final
class ShardedOptimizer:
    """AdamW in fp32 (fp64 for a model in fp64). A bf16 parameter has an fp32 master, that is updated, then rounded.

    Weights of two or more dimensions decay; biases and norms do not. Constructed and called by every rank. With
    `copies` of at least the number of replicas, or "all", everyone keeps everything and nothing is sent.
    """

    def __init__(
        self, model: nn.Module, plan: ParallelPlan, *, world: World, rule: AdamW | None = None, copies: Copies = 2
    ) -> None:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        layout = plan.layout_of(world.device)
        self.dtype = _common_dtype(parameters)
        self.parameters: Tiles = {
            spec.name: tiles_of(parameters[spec.name], spec, ranges=layout.held(spec, world.device))
            for spec in plan.structure.parameters
        }
        self._rule = rule or AdamW()
        shards = shards_of(plan, copies)
        self.states = tuple(
            ShardState(shard, dtype=self.dtype, torch_device=world.torch_device)
            for shard in shards
            if world.device in shard.holders
        )
        self.set_masters()
        moves = transfers(states_held(plan, shards), parameters_held(plan), structure=plan.structure)
        self._gather: Exchange | None = None
        if moves:  # on all ranks, or on none
            group = world.group(plan.devices, purpose=PURPOSE)
            self._gather = Exchange(moves, source=self.parameters, target=self.parameters, group=group)
        self._gradients: Tiles = {}
        self._runs: tuple[_Run, ...] = ()

    def set_masters(self) -> None:
        """Take master weights from the parameters, which something else has set."""
        for state in self.states:
            if state.master is not None:
                copy_common(self.parameters, flat_tiles(state.master, state.shard.parts))

    @property
    def precision(self) -> torch.dtype:
        """That of the state."""
        return precision_of(self.dtype)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the state of an element consists of."""
        moments = ("exp_avg", "exp_avg_sq")
        return moments if self.dtype == self.precision else (*moments, "master")

    def step(self, gradients: Tiles, *, lr: float) -> None:
        """Update every parameter by its gradient (`Gradients.tiles`), at learning rate `lr`."""
        self.update(gradients, lr=lr)
        self.gather()

    @torch.no_grad()
    def update(self, gradients: Tiles, *, lr: float) -> None:
        """The part without communication: new values for all that is kept here."""
        if gradients is not self._gradients:  # the same from step to step
            self._gradients, self._runs = gradients, tuple(self._find_runs(gradients))
        for batch in _batches(self._runs):
            strips = [_strip(run) for run in batch]
            self._rule.update(strips, lr=lr)
            for run, strip in zip(batch, strips, strict=True):
                parts = strip.values.view(-1).split([place.numel() for place in run.values])
                for place, part in zip(run.values, parts, strict=True):
                    place.copy_(part.view(place.shape))
        for state in self.states:
            state.step += 1

    def gather(self) -> None:
        """The other part: receive the new values of all that is kept elsewhere."""
        if self._gather is not None:
            self._gather.run(dtype=self.dtype)

    def tiles(self, kind: str) -> Tiles:
        """The tiles of the state that is kept here: of "exp_avg", "exp_avg_sq" or, where there are any, "master"."""
        found: dict[str, list[Tile]] = {}
        for state in self.states:
            for name, tiles in flat_tiles(state.kinds[kind], state.shard.parts).items():
                found.setdefault(name, []).extend(tiles)
        return found

    def _find_runs(self, gradients: Tiles) -> Iterator[_Run]:
        for state in self.states:
            waiting: _Run | None = None
            stop = 0
            for spec, ranges in state.shard.parts:
                for interval in ranges:
                    ((_, gradient),) = cut(gradients[spec.name], (interval,))
                    ((_, place),) = cut(self.parameters[spec.name], (interval,))
                    start, stop = stop, stop + gradient.numel()
                    run = _Run(state, slice(start, stop), gradient, (place,))
                    joined = None if waiting is None else _join(waiting, run)
                    if waiting is not None and joined is None:
                        yield waiting
                    waiting = joined or run
            if waiting is not None:
                yield waiting


def _join(first: _Run, second: _Run) -> _Run | None:
    """Two runs as one, if their gradients are neighbours in memory, and both decay or neither does."""
    a, b = first.gradient, second.gradient
    is_together = (
        a.is_contiguous()
        and b.is_contiguous()
        and a.data_ptr() + a.numel() * a.element_size() == b.data_ptr()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and (first.values[0].ndim >= 2) == (second.values[0].ndim >= 2)
    )
    if not is_together:
        return None
    both = a.as_strided((a.numel() + b.numel(),), (1,), a.storage_offset())
    return _Run(first.state, slice(first.own.start, second.own.stop), both, first.values + second.values)


def _strip(run: _Run) -> Strip:
    state, own, gradient = run.state, run.own, run.gradient
    values = torch.cat([place.reshape(-1) for place in run.values]) if state.master is None else state.master[own]
    # A part of a row-parallel weight is no run of memory: its gradient stays, the others take its shape.
    shape = (-1,) if gradient.is_contiguous() else gradient.shape
    flats = [flat.view(shape) for flat in (values, state.exp_avg[own], state.exp_avg_sq[own])]
    return Strip(flats[0], gradient.view(shape), flats[1], flats[2], state.step, decays=run.values[0].ndim >= 2)


def _batches(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    batch: list[_Run] = []
    size = 0
    for run in runs:
        batch.append(run)
        size += run.gradient.numel()
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
