"""What must move so that devices hold what they should: a function of who has what and who needs what.

One description serves parameters and optimizer state, an ordinary step and a change of plan. Whoever has an element
already does not get it again, so the bytes moved are those that are missing.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from uneven.layout.model import ModelStructure, ParameterSpec
from uneven.layout.plan import ParallelPlan
from uneven.layout.ranges import Ranges, common, union, without
from uneven.layout.shards import StateShard

Holding = Mapping[str, Ranges]
"""What one device has: for each parameter, by name, ranges along its `dim`."""
Holdings = Mapping[int, Holding]
"""By device."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements of a parameter, as ranges along its `dim`, that `source` has and `destination` needs."""

    source: int
    destination: int
    spec: ParameterSpec
    ranges: Ranges

    @property
    def num_elements(self) -> int:
        return self.spec.count(self.ranges)


def parameters_held(plan: ParallelPlan) -> dict[int, dict[str, Ranges]]:
    """The parameters of each device under a plan."""
    return {
        device: {spec.name: union(replica.layout.held(spec, device)) for spec in plan.structure.parameters}
        for replica in plan.replicas
        for device in replica.layout.devices
    }


def states_held(plan: ParallelPlan, shards: tuple[StateShard, ...]) -> dict[int, dict[str, Ranges]]:
    """The elements of which each device keeps the optimizer's state."""
    found: dict[int, dict[str, Ranges]] = {device: {} for device in plan.devices}
    for shard in shards:
        for spec, ranges in shard.parts:
            for holder in shard.holders:
                found[holder][spec.name] = (*found[holder].get(spec.name, ()), *ranges)
    return {device: {name: union(ranges) for name, ranges in held.items()} for device, held in found.items()}


def transfers(have: Holdings, want: Holdings, *, structure: ModelStructure) -> tuple[Transfer, ...]:
    """The moves after which every device of `want` has what it wants; what nobody has is left out (`lost`).

    Each element comes from the device that has sent least so far, so sources share the work; the same on every rank.
    """
    sent: Counter[int] = Counter()
    moves = []
    for spec in structure.parameters:
        holders = {device: holding[spec.name] for device, holding in sorted(have.items()) if holding.get(spec.name)}
        for destination, wanted in sorted(want.items()):
            missing = without(wanted.get(spec.name, ()), holders.get(destination, ()))
            while missing:
                found = {device: common(missing, ranges) for device, ranges in holders.items()}
                sources = [device for device in holders if found[device]]
                if not sources:
                    break
                source = min(sources, key=lambda device: (sent[device], device))
                moves.append(Transfer(source, destination, spec, found[source]))
                sent[source] += spec.count(found[source])
                missing = without(missing, found[source])
    return tuple(moves)


def lost(have: Holdings, want: Holdings, *, structure: ModelStructure) -> tuple[tuple[ParameterSpec, Ranges], ...]:
    """What some device wants and none has."""
    found = []
    for spec in structure.parameters:
        wanted = union(part for holding in want.values() for part in holding.get(spec.name, ()))
        had = union(part for holding in have.values() for part in holding.get(spec.name, ()))
        missing = without(wanted, had)
        if missing:
            found.append((spec, missing))
    return tuple(found)
