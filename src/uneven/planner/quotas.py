"""How many units of a module each device of a replica gets or gives when devices leave or come.

Numbers only; which units these are is decided in `fit`.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from uneven.planner.modules import Module


@dataclass(frozen=True, slots=True)
class Quotas:
    """Fair shares of one module, in proportion to `weights`: whole numbers that add up to `total`.

    `excess` is what each device holds beyond its fair share of the modules that were divided before, in elements
    times `total`. It decides who takes a remainder, so that remainders even out over all modules together.
    """

    module: Module
    weights: Mapping[int, int]
    total: int
    excess: Mapping[int, int]

    def floor(self, device: int) -> int:
        return self.module.num_units * self.weights[device] // self.total

    def ceiling(self, device: int) -> int:
        return -(-self.module.num_units * self.weights[device] // self.total)

    def over(self, device: int, count: int) -> int:
        """How far `count` units are above the fair share, in units times `total`."""
        return count * self.total - self.module.num_units * self.weights[device]

    def burden(self, device: int, count: int) -> float:
        """The excess of a device, relative to its weight, once it holds `count` units of this module."""
        return (self.excess[device] + self.module.unit * self.over(device, count)) / self.weights[device]

    def inherit(self, counts: Mapping[int, int], num_lost: int) -> Counter[int]:
        """Who gets how many of the units lost by others, beside the `counts` held.

        First whoever is furthest below its fair share rounded down, then one each the least burdened. There is room
        for all: fair shares rounded up add up to no less than the module.
        """
        places = []
        for position, (device, count) in enumerate(counts.items()):
            floor = self.floor(device)
            for held in range(count, self.ceiling(device)):
                place = (False, held - floor) if held < floor else (True, self.burden(device, held + 1))
                places.append((*place, position, device))
        return Counter(device for *_, device in sorted(places)[:num_lost])

    def draw(self, counts: Mapping[int, int], joiners: Collection[int]) -> tuple[Counter[int], Counter[int]]:
        """Who gives and who takes how many units, so that each joiner has its fair share rounded down.

        Units come from whoever is most over its fair share, among equals from the most burdened. Where the share of
        a joiner isn't whole it takes one more, if who gives that would else be more burdened than the joiner then is.
        """
        surplus = sorted(
            (-self.over(device, held), -self.burden(device, held), position, device)
            for position, (device, count) in enumerate(counts.items())
            if device not in joiners
            for held in range(self.floor(device) + 1, count + 1)
            if self.over(device, held) > 0
        )
        taken = Counter({joiner: max(self.floor(joiner) - counts[joiner], 0) for joiner in joiners})
        num_given = taken.total()
        for joiner in joiners:
            count = counts[joiner] + taken[joiner]
            can_take = count < self.ceiling(joiner) and num_given < len(surplus)
            if can_take and self.burden(joiner, count + 1) < -surplus[num_given][1]:
                taken[joiner] += 1
                num_given += 1
        return Counter(device for *_, device in surplus[:num_given]), +taken
