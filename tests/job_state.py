"""The state of a training job on all devices of a plan, in one process: saved to and loaded from checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tests import layouts, models, oracle
from uneven.checkpoint.export import flat_tile, saved_buffers
from uneven.checkpoint.folder import Checkpoint, make_draft, open_checkpoint, part_file, publish
from uneven.checkpoint.manifest import BUFFER, STATE, Manifest
from uneven.checkpoint.restore import read_tiles
from uneven.checkpoint.write import copy_tiles, write_part, written_by
from uneven.layout import ParallelPlan, StateShard, shards_of
from uneven.modelspec import ModelSpec
from uneven.reshard import Tile, Tiles, copy_common, flat_tiles, tiles_of

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
    flats: dict[int, list[tuple[StateShard, dict[str, torch.Tensor]]]]

    @classmethod
    def of(cls, spec: ModelSpec, plan: ParallelPlan, *, copies: Any = "all", state: State | None = None) -> "Job":
        """With the parts of `state`, or zeros."""
        job = cls(spec, plan, copies, {}, {})
        whole = state or {k: {n: torch.zeros_like(t) for n, t in v.items()} for k, v in random_state(spec).items()}
        dtype = next(iter(whole["value"].values())).dtype
        for device in plan.devices:
            job.local[device] = {
                kind: {name: oracle.local_part(plan, name, each, device=device) for name, each in tensors.items()}
                for kind, tensors in whole.items()
            }
            job.flats[device] = [
                (shard, {kind: torch.zeros(shard.num_elements, dtype=dtype) for kind in STATE})
                for shard in shards_of(plan, copies)
                if device in shard.holders
            ]
            for kind in STATE:
                copy_common(job.held(device, kind), job.kept(device, kind))
        return job

    def held(self, device: int, kind: str) -> Tiles:
        """The local parts of all parameters, or of another kind as if it were there as parameters are."""
        layout, tensors = self.plan.layout_of(device), self.local[device][kind]
        specs = self.spec.structure.parameters
        return {spec.name: tiles_of(tensors[spec.name], spec, ranges=layout.held(spec, device)) for spec in specs}

    def kept(self, device: int, kind: str) -> Tiles:
        """What the device keeps of the optimizer's state."""
        found: dict[str, list[Tile]] = {}
        for shard, flats in self.flats[device]:
            for name, tiles in flat_tiles(flats[kind], shard.parts).items():
                found.setdefault(name, []).extend(tiles)
        return found

    def wanted_by(self, device: int) -> list[tuple[str, Tiles]]:
        return [(kind, self.held(device, kind)) for kind in STATE]

    def save(
        self, run: Path, *, step: int = 1, buffers: Mapping[str, torch.Tensor] = MappingProxyType({}), **facts: Any
    ) -> Checkpoint:
        draft = make_draft(run, step, tag="t")
        shapes = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        written = written_by(self.plan, shards_of(self.plan, self.copies), buffers=shapes)
        parts = []
        for device in self.plan.devices:
            state = [(kind, self.kept(device, kind)) for kind in STATE]
            state.append((BUFFER, {name: flat_tile(buffer) for name, buffer in buffers.items()}))
            parts.append(write_part(copy_tiles(state, written[device]), part_file(draft, device)))
        values: dict[str, Any] = {"dtype": "float32", "config": self.spec.config, "buffers": shapes, "extra": {}}
        counts = {"num_updates": step, "tokens": step, "time_s": 0.0, "seed": 0}
        structure = self.spec.structure
        manifest = Manifest(step=step, structure=structure, parts=tuple(parts), **counts, **values | facts)
        return open_checkpoint(publish(draft, manifest))

    def load(self, checkpoint: Checkpoint) -> None:
        """All devices in turn; first what models need, then shards."""
        for device in self.plan.devices:
            read_tiles(checkpoint, self.wanted_by(device))
            read_tiles(checkpoint, [(kind, self.kept(device, kind)) for kind in STATE])

    def assert_equal(self, other: "Job") -> None:
        for device, state in self.local.items():
            for kind, tensors in state.items():
                for name, tensor in tensors.items():
                    assert torch.equal(tensor, other.local[device][kind][name]), (device, kind, name)
            for (_, flats), (_, needed) in zip(self.flats[device], other.flats[device], strict=True):
                for kind, flat in flats.items():
                    assert torch.equal(flat, needed[kind]), (device, kind)


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
    buffers = {name: buffer.normal_() for name, buffer in saved_buffers(stock)}
    job.save(run, step=7, dtype=str(dtype).removeprefix("torch."), buffers=buffers)
    return stock
