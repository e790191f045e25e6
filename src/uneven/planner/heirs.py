"""Which units of a replica's modules go to whom when its devices change."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from uneven.layout import ModelLayout, ModelStructure, Partition, Shard
from uneven.planner.quotas import Quotas

Owners = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """What one unit of a module weighs: `unit` elements of its own, and `shared` ones with the others of its group."""

    name: str
    num_units: int
    group: int
    unit: int
    shared: int

    def elements(self, owners: Sequence[int], device: int) -> int:
        """How many of them a device holds."""
        units = [unit for unit, owner in enumerate(owners) if owner == device]
        return len(units) * self.unit + len({unit // self.group for unit in units}) * self.shared


def modules_of(structure: ModelStructure) -> list[Module]:
    """Largest units first: smaller ones can even out what they leave."""
    unit, shared = Counter[str](), Counter[str]()
    for spec in structure.parameters:
        if isinstance(spec.placement, Shard):
            for band in spec.placement.bands:
                elements = band.block * (spec.num_elements // spec.shape[spec.placement.dim])
                (unit if band.group == 1 else shared)[spec.placement.module] += elements
    groups = structure.kv_groups
    modules = [
        Module(name, axis.num_units, groups.get(name, 1), unit[name], shared[name])
        for name, axis in structure.axes.items()
    ]
    return sorted(modules, key=lambda module: -module.unit)


@dataclass(frozen=True, slots=True)
class Succession:
    """One replica: the `devices` it is to have, their whole-number weights, who held what at `home`, and the layouts
    of the other replicas, by which tuples of owners are known."""

    devices: tuple[int, ...]
    weights: Mapping[int, int]
    home: ModelLayout
    others: Sequence[ModelLayout]

    def apply(self, layout: ModelLayout) -> ModelLayout:
        """The layout with the units of those who left in the hands of others, and the joiners given their part."""
        total = sum(self.weights[device] for device in self.devices)
        joiners = [device for device in self.devices if device not in layout.devices]
        known = self._tuples(layout)
        excess = dict.fromkeys(self.devices, 0)
        partitions = dict(layout.partitions)
        for module in modules_of(layout.structure):
            owners = list(layout.partitions[module.name].owners)
            fit = _Fit(module, self.home.partitions[module.name].owners, self._peers(module.name), known)
            quotas = Quotas(module.num_units, module.unit, self.weights, total, excess)
            held = Counter(owners)
            lost = Counter({device: count for device, count in held.items() if device not in self.devices})
            kept = {device: held[device] for device in self.devices}
            heirs = quotas.inherit(kept, lost.total())
            fit.hand_over(owners, given=lost, taken=heirs)
            if joiners:
                counts = {device: kept[device] + heirs[device] for device in self.devices}
                given, taken = quotas.draw(counts, joiners)
                fit.hand_over(owners, given=given, taken=taken)
            for device in self.devices:
                fair = (module.num_units * module.unit) * self.weights[device]
                excess[device] += module.elements(owners, device) * total - fair
            known.update(zip(fit.peers, owners, strict=True))
            partitions[module.name] = Partition(tuple(owners))
        return ModelLayout(layout.structure, self.devices, partitions)

    def _peers(self, module: str) -> list[Owners]:
        """The owners of each unit in the other replicas."""
        if not self.others:
            return [()] * self.home.structure.axes[module].num_units
        return list(zip(*(other.partitions[module].owners for other in self.others), strict=True))

    def _tuples(self, layout: ModelLayout) -> set[tuple[Owners, int]]:
        """Owners in the other replicas with the one in this, for all units of all modules."""
        alike = {
            (layout.partitions[module].owners, *(other.partitions[module].owners for other in self.others)): module
            for module in layout.partitions
        }
        return {
            pair
            for module in alike.values()
            for pair in zip(self._peers(module), layout.partitions[module].owners, strict=True)
        }


@dataclass(frozen=True, slots=True)
class _Fit:
    """How well a device suits a unit of one module."""

    module: Module
    home: Owners
    peers: Sequence[Owners]
    known: set[tuple[Owners, int]]

    def hand_over(self, owners: list[int], *, given: Counter[int], taken: Counter[int]) -> None:
        """Change owners: as many units as `given` says of a device go to the devices in `taken`, best fit first.

        In this order: no further copy of a group's shared elements; the owner at home; a tuple of owners that there
        is already; the owner of a neighbouring unit; the earlier unit, the earlier device.
        """
        group = self.module.group
        copies = Counter((unit // group, owner) for unit, owner in enumerate(owners)) if group > 1 else None
        pairs = []
        for unit, owner in enumerate(owners):
            if not given[owner]:
                continue
            around = owners[max(unit - 1, 0) : unit + 2]
            for position, device in enumerate(taken):
                new = 0
                if copies is not None:
                    new = (not copies[unit // group, device]) - (copies[unit // group, owner] == 1)
                is_known = (self.peers[unit], device) in self.known
                fit = (new, self.home[unit] != device, not is_known, device not in around)
                pairs.append((fit, unit, position, device))
        given, taken = given.copy(), taken.copy()
        for _, unit, _, device in sorted(pairs):
            owner = owners[unit]
            if given[owner] and taken[device]:
                given[owner] -= 1
                taken[device] -= 1
                owners[unit] = device
