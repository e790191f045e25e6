"""The published way to sum gradients of a healthy and a reduced replica, written here to be compared with.

Arfeen et al., arXiv 2504.06095: the healthy replica's extra devices send their gradients to its core devices, which
all-reduce one to one with the devices of the reduced replica and send the sums back. Here with buckets, launched in
backward as `GradReducer` launches its own, and with the partition that suits the scheme best: after the gather a core
device has just the units of its partner.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from uneven.comm import Group, Pending, World
from uneven.layout import (
    ModelLayout,
    ModelStructure,
    ParallelPlan,
    ParameterSpec,
    Partition,
    ReplicaPlan,
    Replicate,
    Segment,
    apportion,
    segments_of,
    slabs_of,
)

PAIRS, INSIDE = "pairs", "inside"
"""Purposes: between the replicas, and within the healthy one."""


def gather_plan(structure: ModelStructure, *, healthy: int, reduced: int) -> ParallelPlan:
    """Devices 0 to `healthy` - 1, of which the first `reduced` are the core, beside a replica of `reduced` devices."""
    partners = range(healthy, healthy + reduced)
    ours, theirs = {}, {}
    for module, axis in structure.axes.items():
        counts = apportion(axis.num_units, [1.0] * healthy)
        theirs[module] = Partition.from_shares(axis.num_units, dict.fromkeys(partners, 1.0))
        extras = iter([device for device in range(reduced, healthy) for _ in range(counts[device])])
        owners = []
        for core, partner in enumerate(partners):
            spare = theirs[module].count(partner) - counts[core]
            owners += [core] * counts[core] + [next(extras) for _ in range(spare)]
        ours[module] = Partition(tuple(owners))
    return ParallelPlan(
        (
            ReplicaPlan(ModelLayout(structure, tuple(range(healthy)), ours), healthy),
            ReplicaPlan(ModelLayout(structure, tuple(partners), theirs), reduced),
        )
    )


@dataclass(slots=True)
class _Bucket:
    """`sums` are all-reduced; before, a core device fills `gathered` parts of them from its extras and afterwards
    returns them, and an extra device has `sent` parts. `pieces` as (parameter, dim, local start, view, counts)."""

    sums: list[tuple[Group, torch.Tensor]] = field(default_factory=list)
    gathered: list[tuple[Group, torch.Tensor]] = field(default_factory=list)
    sent: list[tuple[Group, torch.Tensor]] = field(default_factory=list)
    pieces: list[tuple[str, int, int, torch.Tensor, bool]] = field(default_factory=list)

    @property
    def flats(self) -> Iterator[torch.Tensor]:
        yield from (flat for _, flat in [*self.sums, *self.sent])


class GatherReducer:
    """The scheme, with the interface of `GradReducer`; for a plan of `gather_plan`."""

    def __init__(self, model: nn.Module, plan: ParallelPlan, *, world: World, bucket_bytes: int) -> None:
        self._world, self._plan = world, plan
        self._buckets = [self._build(specs) for specs in _fill(plan, bucket_bytes // 4)]
        self._missing: list[int] = []
        self._pending: list[list[Pending]] = []
        parameters = dict(model.named_parameters())
        for index, bucket in enumerate(self._buckets):
            for name in {piece[0] for piece in bucket.pieces}:
                parameters[name].register_post_accumulate_grad_hook(self._collector(index, name))

    def begin(self, num_backwards: int = 1) -> None:
        for bucket in self._buckets:
            for flat in bucket.flats:
                flat.zero_()
        self._missing = [num_backwards * len({piece[0] for piece in bucket.pieces}) for bucket in self._buckets]
        self._pending = []

    def finish(self) -> "GatherReducer":
        while len(self._pending) < len(self._buckets):
            self._launch()
        for bucket, pending in zip(self._buckets, self._pending, strict=True):
            for each in pending:
                each.wait()
            for group, part in bucket.gathered:
                send(part, group)
            for group, part in bucket.sent:
                receive(part, group)
        return self

    def by_name(self) -> dict[str, torch.Tensor]:
        pieces = defaultdict(list)
        for bucket in self._buckets:
            for name, dim, start, view, _ in bucket.pieces:
                pieces[name].append((start, dim, view))
        return {
            name: torch.cat([view for _, _, view in sorted(found, key=lambda piece: piece[0])], dim=found[0][1])
            for name, found in pieces.items()
        }

    def _collector(self, index: int, name: str) -> Callable[[torch.Tensor], None]:
        mine = [piece for piece in self._buckets[index].pieces if piece[0] == name]

        def collect(parameter: torch.Tensor) -> None:
            for _, dim, start, view, is_counted in mine:
                if is_counted:
                    view.add_(parameter.grad.narrow(dim, start, view.shape[dim]))
            parameter.grad = None
            self._missing[index] -= 1
            while len(self._pending) < len(self._buckets) and self._missing[len(self._pending)] == 0:
                self._launch()

        return collect

    def _launch(self) -> None:
        bucket = self._buckets[len(self._pending)]
        for group, part in bucket.sent:
            send(part, group)
        for group, part in bucket.gathered:
            receive(part, group)
        self._pending.append([group.start_all_reduce(flat) for group, flat in bucket.sums])

    def _build(self, specs: list[ParameterSpec]) -> _Bucket:
        plan, world, bucket = self._plan, self._world, _Bucket()
        core_of = dict(zip(plan.replicas[1].layout.devices, plan.replicas[0].layout.devices, strict=False))
        routes: defaultdict[tuple[int, int], list[tuple[int, ParameterSpec, Segment]]] = defaultdict(list)
        copied: list[tuple[int, ParameterSpec, Segment]] = []
        for spec in specs:
            for segment in segments_of(plan, spec):
                if isinstance(spec.placement, Replicate):
                    copied.append((world.device, spec, segment))
                else:
                    source, partner = segment.members
                    routes[core_of[partner], partner].append((source, spec, segment))
        for (core, partner), entries in sorted(routes.items()):
            for source in sorted({source for source, _, _ in entries} - {core}):
                group = (core, source)
                theirs = [entry for entry in entries if entry[0] == source]
                if world.device == source:
                    bucket.sent.append((world.group(group, purpose=INSIDE), self._lay_out(bucket, theirs)))
            if world.device in (core, partner):
                # The core's own first, then each extra's in one piece.
                entries.sort(key=lambda entry: (entry[0] != core, entry[0]))
                flat = self._lay_out(bucket, entries)
                bucket.sums.append((world.group((core, partner), purpose=PAIRS), flat))
                if world.device == core:
                    self._add_gathered(bucket, flat, entries)
        if copied:
            bucket.sums.append((world.everyone(purpose=PAIRS), self._lay_out(bucket, copied)))
        return bucket

    def _add_gathered(
        self, bucket: _Bucket, flat: torch.Tensor, entries: list[tuple[int, ParameterSpec, Segment]]
    ) -> None:
        sizes: dict[int, int] = {}
        for source, spec, segment in entries:
            sizes[source] = sizes.get(source, 0) + spec.count(segment.ranges)
        parts = flat.split(list(sizes.values()))
        for source, part in zip(sizes, parts, strict=True):
            if source != self._world.device:
                group = self._world.group((self._world.device, source), purpose=INSIDE)
                bucket.gathered.append((group, part))

    def _lay_out(self, bucket: _Bucket, entries: list[tuple[int, ParameterSpec, Segment]]) -> torch.Tensor:
        """A flat buffer for some segments, and this rank's pieces in it."""
        flat = torch.zeros(sum(spec.count(segment.ranges) for _, spec, segment in entries))
        layout, device = self._plan.layout_of(self._world.device), self._world.device
        offset = 0
        for source, spec, segment in entries:
            if device not in (source, *segment.members[1:]):
                offset += spec.count(segment.ranges)
                continue
            for slab in slabs_of(spec, segment, layout=layout, device=device):
                view = flat[offset : offset + slab.num_elements].view(slab.shape)
                offset += slab.num_elements
                bucket.pieces.append((spec.name, slab.dim, slab.start, view, device in segment.contributors))
        return flat


def send(part: torch.Tensor, group: Group) -> None:
    """A message of plain gloo to the other one of two, counted as the package counts its own."""
    group._record("send", part)
    group._connections.send([part], 1 - group.rank, 0).wait()


def receive(part: torch.Tensor, group: Group) -> None:
    group._record("receive", part)
    group._connections.recv([part], 1 - group.rank, 0).wait()


def _fill(plan: ParallelPlan, bucket_elements: int) -> Iterator[list[ParameterSpec]]:
    """Buckets as `uneven.sync` fills them: by full sizes, in reverse order of registration."""
    bucket: list[ParameterSpec] = []
    for spec in reversed(plan.structure.parameters):
        bucket.append(spec)
        if sum(each.num_elements for each in bucket) >= bucket_elements:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
