"""One replica whose devices change: module after module, lost units to survivors, then to each joiner its part."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from uneven.layout import ModelLayout, Partition
from uneven.planner.fit import Fit, Owners
from uneven.planner.modules import modules_of
from uneven.planner.quotas import Quotas

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Succession:
    """`devices` is who the replica is to have, `survivors` who among them hold units already, `weights` are whole
    numbers, `home` is the layout that the job started with, `others` are those of the other replicas."""

    devices: tuple[int, ...]
    survivors: frozenset[int]
    weights: Mapping[int, int]
    home: ModelLayout
    others: Sequence[ModelLayout]

    def layout_after(self, layout: ModelLayout) -> ModelLayout:
        """What becomes of `layout`; what others than survivors hold in it is lost."""
        total = sum(self.weights[device] for device in self.devices)
        owned = {module: self._owners(layout, module) for module in layout.partitions}
        known = {members for owners in set(owned.values()) for members in zip(*owners, strict=True)}
        done: dict[Hashable, Owners] = {}
        excess = dict.fromkeys(self.devices, 0)
        partitions = dict(layout.partitions)
        for module in modules_of(layout.structure):
            *others, before = owned[module.name]
            fit = Fit(module.group, self.home.partitions[module.name].owners, tuple(others), known, done)
            owners = self._divide(before, quotas=Quotas(module, self.weights, total, excess), fit=fit)
            held = module.held(owners)
            for device in self.devices:
                excess[device] += held[device] * total - module.num_elements * self.weights[device]
            partitions[module.name] = Partition(owners)
        return ModelLayout(layout.structure, self.devices, partitions)

    def _owners(self, layout: ModelLayout, module: str) -> tuple[Owners, ...]:
        """Of a module's units in every replica, this one last."""
        return tuple(replica.partitions[module].owners for replica in (*self.others, layout))

    def _divide(self, before: Owners, *, quotas: Quotas, fit: Fit) -> Owners:
        owners = tuple([owner if owner in self.survivors else NOBODY for owner in before])
        held = Counter(owners)
        counts = {device: held[device] for device in self.devices}
        if num_lost := held[NOBODY]:
            heirs = quotas.inherit(counts, num_lost)
            owners = fit.hand_over(owners, given={NOBODY: num_lost}, taken=heirs)
            counts = {device: count + heirs[device] for device, count in counts.items()}
        joiners = [device for device in self.devices if device not in self.survivors]
        if joiners:
            given, taken = quotas.draw(counts, joiners)
            owners = fit.hand_over(owners, given=given, taken=taken)
        return owners
