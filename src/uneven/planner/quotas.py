"""How many units of a module each device of a replica gets or gives when devices leave or come.

Numbers only; which units these are is decided in `heirs`.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quotas:
    """Fair shares of one module: `num_units` in proportion to `weights`, whole numbers that add up to `total`.

    `unit` is the elements of a unit. `excess` is what each device holds beyond its fair share of the modules that
    were divided before, in elements times `total`: it decides who takes a remainder, so that over all modules
    together remainders even out.
    """

    num_units: int
    unit: int
    weights: Mapping[int, int]
    total: int
    excess: Mapping[int, int]

    def floor(self, device: int) -> int:
        return self.num_units * self.weights[device] // self.total

    def ceiling(self, device: int) -> int:
        return -(-self.num_units * self.weights[device] // self.total)

    def over(self, device: int, count: int) -> int:
        """How far `count` units are above the fair share, in units times `total`."""
        return count * self.total - self.num_units * self.weights[device]

    def burden(self, device: int, count: int) -> float:
        """The excess of a device, in proportion to its weight, once it holds `count` units of this module."""
        return (self.excess[device] + self.unit * self.over(device, count)) / self.weights[device]

    def inherit(self, counts: Mapping[int, int], num_lost: int) -> Counter[int]:
        """Who gets how many of the units lost by others, beside the `counts` held.

        First whoever is furthest below its fair share rounded down, then one each the least burdened. There is room
        for all: fair shares rounded up add up to no less than the module.
        """
        places = [
            (held >= floor, self.burden(device, held + 1) if held >= floor else held - floor, position, device)
            for position, (device, count) in enumerate(counts.items())
            for floor in [self.floor(device)]
            for held in range(count, self.ceiling(device))
        ]
        return Counter(device for *_, device in sorted(places)[:num_lost])

    def draw(self, counts: Mapping[int, int], joiners: Collection[int]) -> tuple[Counter[int], Counter[int]]:
        """Who gives and who takes how many units, so that each joiner has its fair share rounded down.

        Units come from whoever is most over its fair share, then from the most burdened. Where the share isn't
        whole, a joiner takes one more from a device that is more burdened than itself would be with it.
        """
        surplus = sorted(
            (-self.over(device, held), -self.burden(device, held), position, device)
            for position, (device, count) in enumerate(counts.items())
            if device not in joiners
            for held in range(self.ceiling(device), count + 1)
            if self.over(device, held) > 0
        )
        taken = Counter({joiner: max(self.floor(joiner) - counts[joiner], 0) for joiner in joiners})
        num_given = taken.total()
        for joiner in joiners:
            held = counts[joiner] + taken[joiner]
            if num_given < len(surplus) and held < self.ceiling(joiner):
                if self.burden(joiner, held + 1) < -surplus[num_given][1]:
                    taken[joiner] += 1
                    num_given += 1
        return Counter(device for *_, device in surplus[:num_given]), taken
