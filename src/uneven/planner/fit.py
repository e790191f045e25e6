"""Which units go to whom, once it is decided how many."""

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass

Owners = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """What makes a device suit a unit of one module.

    `group` query heads share a key and value head; `home` is who owned each unit when the job started, `others` who
    owns it in each of the other replicas. All modules of a replica share `known`, the tuples of owners that have a
    gradient group, and `done`, what was handed over so far: layers that are alike are divided alike.
    """

    group: int
    home: Owners
    others: tuple[Owners, ...]
    known: set[Owners]
    done: dict[Hashable, Owners]

    def hand_over(self, owners: Owners, *, given: Mapping[int, int], taken: Mapping[int, int]) -> Owners:
        """New owners: so many units of each device in `given` go to devices in `taken`, the best fit first.

        What counts, in this order: a copy of a key and value head less or more; the owner at home; no new gradient
        group; the owner of a neighbouring unit. Among equals the earliest unit goes to the earliest device, so that
        runs stay together.
        """
        case = (self.group, self.home, self.others, owners, tuple(given.items()), tuple(taken.items()))
        if case not in self.done:
            gives, takes, found = dict(given), dict(taken), list(owners)
            for _, unit, _, device in sorted(self._candidates(owners, given, takers=tuple(taken))):
                if takes[device] and found[unit] == owners[unit] and gives[owners[unit]]:
                    gives[owners[unit]] -= 1
                    takes[device] -= 1
                    found[unit] = device
            self.known.update(zip(*self.others, found, strict=True))
            self.done[case] = tuple(found)
        return self.done[case]

    def _candidates(
        self, owners: Owners, givers: Collection[int], *, takers: Owners
    ) -> Iterator[tuple[int, int, int, int]]:
        """Misfit, unit, position of the device, device."""
        copies = Counter((unit // self.group, owner) for unit, owner in enumerate(owners)) if self.group > 1 else {}
        for unit, owner in enumerate(owners):
            if owner not in givers:
                continue
            elsewhere = tuple(other[unit] for other in self.others)
            around = owners[max(unit - 1, 0) : unit + 2]
            for position, device in enumerate(takers):
                is_new = (*elsewhere, device) not in self.known
                misfit = 4 * (device != self.home[unit]) + 2 * is_new + (device not in around)
                if copies:
                    block = unit // self.group
                    misfit += 8 * (copies[block, device] == 0) - 8 * (copies[block, owner] == 1)
                yield misfit, unit, position, device
