"""Where this rank's gradients lie in the flat buffers that are reduced, in an order that every rank derives alike.

Parameters fill buckets by their full sizes in reverse order of registration, about the order in which backward
finishes them. Within a bucket there is one buffer for each set of members, in ascending order.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from uneven.comm import Group, World
from uneven.layout import Interval, ModelLayout, ParallelPlan, ParameterSpec, Segment, Shard, segments_of

PURPOSE = "grad"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a local gradient along `dim` and the view of a buffer, of the same shape, where it is summed."""

    dim: int
    start: int
    length: int
    view: torch.Tensor
    is_counted: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a local tensor that this piece is about."""
        return tensor.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Gradients, one after the other, that the members of `group` sum."""

    group: Group
    flat: torch.Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters reduced together: this rank's buffers, and its pieces by parameter, empty where it holds nothing."""

    buffers: tuple[Buffer, ...]
    pieces: dict[str, tuple[Piece, ...]]


def build_buckets(plan: ParallelPlan, world: World, *, bucket_bytes: int, dtype: torch.dtype) -> tuple[Bucket, ...]:
    """This rank's buckets. Called by every rank of the plan, since it builds the groups."""
    return tuple(_build(plan, specs, world=world, dtype=dtype) for specs in _fill(plan, bucket_bytes // dtype.itemsize))


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


def _build(plan: ParallelPlan, specs: list[ParameterSpec], *, world: World, dtype: torch.dtype) -> Bucket:
    layout = plan.layout_of(world.device)
    by_members: defaultdict[tuple[int, ...], list[tuple[ParameterSpec, Segment]]] = defaultdict(list)
    for spec in specs:
        for segment in segments_of(plan, spec):
            if world.device in segment.members:
                by_members[segment.members].append((spec, segment))
    buffers = []
    pieces: dict[str, list[Piece]] = {spec.name: [] for spec in specs}
    for members, entries in sorted(by_members.items()):
        views = [
            (spec, segment, _local_runs(spec, segment, layout=layout, device=world.device)) for spec, segment in entries
        ]
        size = sum(prod(shape) for _, _, runs in views for _, _, shape in runs)
        flat = torch.zeros(size, dtype=dtype, device=world.torch_device)
        buffers.append(Buffer(world.group(members, purpose=PURPOSE), flat))
        offset = 0
        for spec, segment, runs in views:
            for dim, start, shape in runs:
                view = flat[offset : offset + prod(shape)].view(shape)
                offset += prod(shape)
                is_counted = world.device in segment.contributors
                pieces[spec.name].append(Piece(dim, start, shape[dim], view, is_counted))
    return Bucket(tuple(buffers), {name: tuple(found) for name, found in pieces.items()})


def _local_runs(
    spec: ParameterSpec, segment: Segment, *, layout: ModelLayout, device: int
) -> list[tuple[int, int, tuple[int, ...]]]:
    """(dim, start, shape) in the local tensor of each range of a segment, in the order of the segment."""
    if segment.ranges is None or not isinstance(spec.placement, Shard):
        return [(0, 0, spec.shape)]
    dim = spec.placement.dim
    held = layout.spec_ranges(spec, device) or ()
    return [
        (dim, _local_offset(held, start), (*spec.shape[:dim], stop - start, *spec.shape[dim + 1 :]))
        for start, stop in segment.ranges
    ]


def _local_offset(held: tuple[Interval, ...], element: int) -> int:
    """The local index of a full element, among the ranges that a rank holds."""
    offset = 0
    for start, stop in held:
        if start <= element < stop:
            return offset + element - start
        offset += stop - start
    raise AssertionError(f"element {element} is not among the ranges {held}")
