"""The state of a training job on all devices of a plan, in one process: saved to and loaded from checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tests import layouts, models, oracle
from uneven.checkpoint.export import saved_buffers
from uneven.checkpoint.folder import Checkpoint, make_draft, open_checkpoint, part_file, publish
from uneven.checkpoint.manifest import Manifest
from uneven.checkpoint.restore import read_slices
from uneven.checkpoint.slices import BUFFER, STATE, Slice, held_slices, matrix_shape, shard_slices
from uneven.checkpoint.write import copy_slices, write_part
from uneven.layout import ParallelPlan, StateShard, bundles_of, shards_of
from uneven.modelspec import BytesRead, ModelSpec
from uneven.optim.bundle import LocalBundle

State = dict[str, dict[str, torch.Tensor]]
"""Tensors by kind and parameter."""


def random_state(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> State:
    """A whole job's, on no device."""
    generator = torch.Generator().manual_seed(0)
    return {
        kind: {
            each.name: torch.randn(each.shape, dtype=dtype, generator=generator) for each in spec.structure.parameters
        }
        for kind in STATE
    }


@dataclass
class Job:
    """A plan, and what each device has of a state: parts of parameters, and flat shards as the optimizer keeps them."""

    spec: ModelSpec
    plan: ParallelPlan
    copies: Any
    local: dict[int, State]
    shards: dict[tuple[int, StateShard], dict[str, torch.Tensor]]

    @cached_property
    def bundles(self) -> dict[Any, Any]:
        return bundles_of(self.plan)

    @classmethod
    def of(cls, spec: ModelSpec, plan: ParallelPlan, *, copies: Any = "all", state: State | None = None) -> "Job":
        """With the parts of `state`, or zeros."""
        job = cls(spec, plan, copies, {}, {})
        whole = state or {k: {n: torch.zeros_like(t) for n, t in v.items()} for k, v in random_state(spec).items()}
        for device in plan.devices:
            job.local[device] = {
                kind: {name: oracle.local_part(plan, name, each, device=device) for name, each in tensors.items()}
                for kind, tensors in whole.items()
            }
            for shard in shards_of(plan, copies):
                if device in shard.holders:
                    job.shards[device, shard] = {kind: job.flat(device, shard, kind) for kind in STATE}
        return job

    def flat(self, device: int, shard: StateShard, kind: str) -> torch.Tensor:
        """A shard of a device's state, in the order of the optimizer."""
        tensors = self.local[device][kind]
        layout = self.plan.layout_of(device)
        bundle = LocalBundle(self.bundles[shard.members], tensors, layout=layout, device=device)
        return bundle.read(shard.start, shard.stop, dtype=next(iter(tensors.values())).dtype)

    def written_by(self, device: int) -> Iterator[tuple[Slice, torch.Tensor]]:
        """The first holder of a shard writes it."""
        for (holder, shard), flats in self.shards.items():
            if holder == device == shard.holders[0]:
                yield from self.slices(shard, flats)

    def slices(self, shard: StateShard, flats: dict[str, torch.Tensor]) -> Iterator[tuple[Slice, torch.Tensor]]:
        for kind, flat in flats.items():
            start = 0
            for each in shard_slices(self.bundles[shard.members], shard, kind=kind):
                yield each, flat[start : start + each.num_elements].view(each.shape)
                start += each.num_elements
            assert start == flat.numel()

    def wanted_by(self, device: int, kinds: tuple[str, ...] = STATE) -> Iterator[tuple[Slice, torch.Tensor]]:
        """The local parts of all parameters, and of the other kinds as well."""
        for kind in kinds:
            for spec in self.spec.structure.parameters:
                rows, _ = matrix_shape(spec)
                columns = self.local[device][kind][spec.name].view(rows, -1)
                start = 0
                for each in held_slices(spec, kind, ranges=self.plan.layout_of(device).spec_ranges(spec, device)):
                    stop = start + each.shape[1]
                    yield each, columns[:, start:stop]
                    start = stop

    def save(self, run: Path, *, step: int = 1, **facts: Any) -> Checkpoint:
        draft = make_draft(run, step, tag="t")
        copies = {device: copy_slices(self.written_by(device)) for device in self.plan.devices}
        parts = tuple(write_part(copy, part_file(draft, device)) for device, copy in copies.items())
        values: dict[str, Any] = {"dtype": "float32", "config": self.spec.config, "buffers": {}, "extra": {}}
        counts = {"num_updates": step, "tokens": step, "time_s": 0.0, "seed": 0}
        structure = self.spec.structure
        manifest = Manifest(step=step, structure=structure, parts=parts, **counts, **values | facts)
        return open_checkpoint(publish(draft, manifest))

    def load(self, checkpoint: Checkpoint) -> list[BytesRead]:
        """All devices in turn; first what models need, then shards."""
        counts = [read_slices(checkpoint, self.wanted_by(device)) for device in self.plan.devices]
        for device in self.plan.devices:
            owned = [self.slices(shard, flats) for (holder, shard), flats in self.shards.items() if holder == device]
            read_slices(checkpoint, chain.from_iterable(owned))
        return counts

    def assert_equal(self, other: "Job") -> None:
        for device, state in self.local.items():
            for kind, tensors in state.items():
                for name, tensor in tensors.items():
                    assert torch.equal(tensor, other.local[device][kind][name]), (device, kind, name)
        for key, flats in self.shards.items():
            for kind, flat in flats.items():
                assert torch.equal(flat, other.shards[key][kind]), (key, kind)


def plan_of(spec: ModelSpec, world: str) -> ParallelPlan:
    if world in layouts.SPECIAL:
        return layouts.special_plan(spec.structure, world)
    return ParallelPlan.from_shares(spec.structure, (layouts.WORLDS | {"2+2+1": [[1, 1], [1, 1], [1]]})[world])


def save_stock(run: Path, name: str, dtype: torch.dtype, *, world: str) -> Any:
    """A checkpoint of the stock model; its state is that model, which is returned."""
    spec = models.model_spec(name)
    stock = oracle.stock_model(spec, seed=5, dtype=torch.float32).requires_grad_(False)
    state = random_state(spec) | {"value": dict(stock.named_parameters())}
    job = Job.of(spec, plan_of(spec, world), copies=1, state=state)
    buffers = {key: buffer.normal_() for key, buffer in saved_buffers(stock)}
    own = job.written_by

    def with_buffers(device: int) -> Iterator[tuple[Slice, torch.Tensor]]:
        yield from own(device)
        if device == 0:
            for key, buffer in buffers.items():
                yield Slice(key, BUFFER, (0, 1), (0, buffer.numel())), buffer.view(1, -1)

    job.written_by = with_buffers
    facts = {"dtype": str(dtype).removeprefix("torch."), "buffers": {k: tuple(b.shape) for k, b in buffers.items()}}
    job.save(run, step=7, **facts)
    return stock
