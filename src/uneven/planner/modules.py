"""What the units of a model's modules weigh, for those who hand them out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from uneven.layout import ModelStructure, Shard


@dataclass(frozen=True, slots=True)
class Module:
    """A unit has `unit` elements of its own, and `shared` ones with its group: `group` query heads share a key and
    value head, of which every device that holds one of them has a copy."""

    name: str
    num_units: int
    group: int
    unit: int
    shared: int

    @property
    def num_elements(self) -> int:
        """Without the shared ones."""
        return self.num_units * self.unit

    def held(self, owners: Sequence[int]) -> Counter[int]:
        """How many elements each owner has, with its copies of shared ones."""
        held = Counter({owner: count * self.unit for owner, count in Counter(owners).items()})
        if self.shared:
            for _, owner in {(unit // self.group, owner) for unit, owner in enumerate(owners)}:
                held[owner] += self.shared
        return held


def modules_of(structure: ModelStructure) -> list[Module]:
    """In the order in which they are divided, so that later ones can even out what earlier ones leave.

    Those with groups come first, since the number of copies can't be foreseen; then those of the largest units.
    """
    units, shared = Counter[str](), Counter[str]()
    for spec in structure.parameters:
        if isinstance(spec.placement, Shard):
            for band in spec.placement.bands:
                elements = band.block * (spec.num_elements // spec.shape[spec.placement.dim])
                (units if band.group == 1 else shared)[spec.placement.module] += elements
    groups = structure.kv_groups
    modules = [
        Module(name, axis.num_units, groups.get(name, 1), units[name], shared[name])
        for name, axis in structure.axes.items()
    ]
    return sorted(modules, key=lambda module: (-module.group, -module.unit))
