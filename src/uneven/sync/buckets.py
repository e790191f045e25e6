"""Where this rank's gradients lie in the flat buffers that are reduced, in an order that every rank derives alike.

Parameters fill buckets by their full sizes in reverse order of registration, about the order in which backward
finishes them. Within a bucket there is one buffer for each group, in ascending order, and in a buffer the part of
one set of members follows that of another. A device of the group that doesn't hold a part leaves it zero.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from uneven.comm import Group, World
from uneven.layout import (
    Members,
    ModelLayout,
    ParallelPlan,
    ParameterSpec,
    Segment,
    groups_of,
    segments_of,
    slabs_of,
)
from uneven.reshard import Tile

PURPOSE = "grad"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a local gradient, from slice `start` on, and the tile of a buffer where it is summed."""

    start: int
    tile: Tile
    is_counted: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a local tensor that this piece is about."""
        return tensor.narrow(self.tile.dim, self.start, self.tile.stop - self.tile.start)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Gradients, one after the other, that `group` sums."""

    group: Group
    flat: torch.Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters reduced together: this rank's buffers, and its pieces by parameter, empty where it holds nothing."""

    buffers: tuple[Buffer, ...]
    pieces: dict[str, tuple[Piece, ...]]


def build_buckets(
    plan: ParallelPlan, world: World, *, bucket_bytes: int, max_groups: int, dtype: torch.dtype
) -> tuple[Bucket, ...]:
    """This rank's buckets. Called by every rank of the plan, since it builds the groups."""
    groups = groups_of(plan, max_groups=max_groups)
    return tuple(
        _build(plan, specs, groups=groups, world=world, dtype=dtype)
        for specs in _fill(plan, bucket_bytes // dtype.itemsize)
    )


def _fill(plan: ParallelPlan, bucket_elements: int) -> Iterator[list[ParameterSpec]]:
    bucket: list[ParameterSpec] = []
    size = 0
    for spec in reversed(plan.structure.parameters):
        bucket.append(spec)
        size += spec.num_elements
        if size >= bucket_elements:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _build(
    plan: ParallelPlan,
    specs: list[ParameterSpec],
    *,
    groups: Mapping[Members, Members],
    world: World,
    dtype: torch.dtype,
) -> Bucket:
    layout = plan.layout_of(world.device)
    by_group: defaultdict[Members, list[tuple[ParameterSpec, Segment]]] = defaultdict(list)
    for spec in specs:
        for segment in segments_of(plan, spec):
            if world.device in groups[segment.members]:
                by_group[groups[segment.members]].append((spec, segment))
    buffers = []
    pieces: dict[str, list[Piece]] = {spec.name: [] for spec in specs}
    for devices, entries in sorted(by_group.items()):
        size = sum(spec.count(segment.ranges) for spec, segment in entries)
        flat = torch.zeros(size, dtype=dtype, device=world.torch_device)
        offset = 0
        for spec, segment in sorted(entries, key=lambda entry: entry[1].members):
            stop = offset + spec.count(segment.ranges)
            if world.device in segment.members:
                pieces[spec.name] += _pieces(spec, segment, flat=flat[offset:stop], layout=layout, device=world.device)
            offset = stop
        buffers.append(Buffer(world.group(devices, purpose=PURPOSE), flat))
    return Bucket(tuple(buffers), {name: tuple(found) for name, found in pieces.items()})


def _pieces(
    spec: ParameterSpec, segment: Segment, *, flat: torch.Tensor, layout: ModelLayout, device: int
) -> Iterator[Piece]:
    """The pieces of a segment, laid into `flat` one after the other."""
    offset = 0
    for slab in slabs_of(spec, segment, layout=layout, device=device):
        view = flat[offset : offset + slab.num_elements].view(slab.shape)
        offset += slab.num_elements
        yield Piece(slab.start, Tile(*slab.elements, slab.dim, view), device in segment.contributors)
