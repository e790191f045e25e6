"""A rank's own account of its seconds: what it is doing now, and since when.

Time is an argument, in seconds of any clock that does not go back. What a step did is tentative until the step is
committed: a rank knows when it is busy and when it waits, and learns afterwards whom it waited for, and whether the
work was kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from uneven.errors import GoodputError
from uneven.goodput.kinds import BUSY, KINDS, TENTATIVE, Kind, check_kinds


@final
class DeviceClock:
    """Seconds by kind since `at`. Used by one thread; inside a step it is `useful`, `communication` or `data`."""

    def __init__(self, at: float, *, kind: Kind = "startup") -> None:
        check_kinds((kind,), where="clock")
        self._kind: Kind = kind
        self._since = at
        self._settled: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self._tentative: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)

    @property
    def kind(self) -> Kind:
        """What the device is doing."""
        return self._kind

    def switch(self, kind: Kind, at: float) -> None:
        """From `at` on it does something else."""
        check_kinds((kind,), where="clock")
        self._close(at)
        self._kind = kind

    @contextmanager
    def of(self, kind: Kind, now: Callable[[], float]) -> Iterator[None]:
        """Something else for the length of a block, then what it did before; also if the block raises."""
        before = self._kind
        self.switch(kind, now())
        try:
            yield
        finally:
            self.switch(before, now())

    def busy_s(self, at: float) -> float:
        """What this device has worked since the last commit: the most of any is the `slowest_busy_s` of `commit`."""
        open_s = self._open_s(at) if self._kind in BUSY else 0.0
        return sum(self._tentative[kind] for kind in BUSY) + open_s

    def commit(self, at: float, *, slowest_busy_s: float) -> None:
        """What was done since the last commit is kept. Of the waiting, what the slowest peer worked longer is `idle`.

        The slowest device is waited for by all others, whose waiting is therefore
        (its busy seconds - their own) and then what the bytes take, which stays `communication`.
        """
        self._close(at)
        self._move_waiting("idle", at_most=slowest_busy_s - self.busy_s(at))
        for kind in TENTATIVE:
            self._settled[kind] += self._tentative[kind]
            self._tentative[kind] = 0.0

    def abandon(self, at: float, *, since_failure_s: float = 0.0) -> None:
        """What was done since the last commit is lost: `repeated`.

        Where a peer failed `since_failure_s` ago, as much of the waiting as that is `detection`. A step that replays
        one committed before is abandoned too, at its end.
        """
        self._close(at)
        self._move_waiting("detection", at_most=since_failure_s)
        self._settled["detection"] += self._tentative["detection"]
        self._settled["repeated"] += sum(self._tentative[kind] for kind in TENTATIVE)
        self._tentative = dict.fromkeys(KINDS, 0.0)

    def totals(self, at: float) -> dict[Kind, float]:
        """Seconds by kind up to `at`, tentative ones under their kind. Their sum is the time since the start."""
        totals = {kind: self._settled[kind] + self._tentative[kind] for kind in KINDS}
        totals[self._kind] += self._open_s(at)
        return totals

    def _move_waiting(self, kind: Kind, *, at_most: float) -> None:
        moved = min(self._tentative["communication"], max(at_most, 0.0))
        self._tentative["communication"] -= moved
        self._tentative[kind] += moved

    def _close(self, at: float) -> None:
        seconds = self._tentative if self._kind in TENTATIVE else self._settled
        seconds[self._kind] += self._open_s(at)
        self._since = at

    def _open_s(self, at: float) -> float:
        if at < self._since:
            raise GoodputError(f"clock: {self._kind} since {self._since:g} s can't end before that, at {at:g} s")
        return at - self._since
