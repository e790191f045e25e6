"""Who hangs: a rank that gives no sign of life, or that does not get on while it waits for nobody.

In a job of collectives one rank that hangs makes all others wait, so progress alone names nobody. Who waits for
others is innocent. Between steps a rank may be busy for long, with building a model or writing it, and says nothing
of its progress; its other thread still says that it lives.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import final

from uneven.launch.rank import Beat

LEAST_S = 5.0
"""Of the limit that is taken from the time of steps: scheduling of a busy machine delays signs of life too."""
STEPS_PER_LIMIT = 20
BUSY_S = 600.0
"""How long a rank may be busy with something else than a step."""


@dataclass(slots=True)
class _Rank:
    heard_s: float
    moved_s: float
    num_beats: int = -1
    is_waiting: bool = False
    is_busy: bool = True
    has_spoken: bool = False
    has_worked: bool = False


@final
class Watch:
    """Limits silence and standstill to `limit_s`, by default to 20 times the time of a step, at least 5 s."""

    def __init__(self, limit_s: float | None = None) -> None:
        self._given_s = limit_s
        self._steps: deque[float] = deque(maxlen=50)
        self._ranks: dict[int, _Rank] = {}

    @property
    def limit_s(self) -> float:
        if self._given_s is not None:
            return self._given_s
        return max(LEAST_S, STEPS_PER_LIMIT * median(self._steps)) if self._steps else 4 * LEAST_S

    def start(self, device: int, now: float) -> None:
        """Watch a process."""
        self._ranks[device] = _Rank(now, now)

    def end(self, device: int) -> None:
        """It has ended."""
        self._ranks.pop(device, None)

    def hear(self, device: int, now: float, *, beat: Beat | None = None) -> None:
        """A sign of life: a beat, or with whatever else a rank says it has got on."""
        rank = self._ranks.get(device)
        if rank is None:
            return
        rank.heard_s, rank.has_spoken = now, True
        if beat is None or beat.num_beats != rank.num_beats:
            rank.moved_s = now
        if beat is not None:
            rank.num_beats, rank.is_waiting, rank.is_busy = beat.num_beats, bool(beat.waiting), beat.is_busy

    def work(self, device: int) -> None:
        """A device has done a step, or settled: from now on it is expected to be as fast as others."""
        if device in self._ranks:
            self._ranks[device].has_worked = True

    def forgive(self, seconds: float) -> None:
        """For so long nobody was listening: what was not heard counts for nobody."""
        for rank in self._ranks.values():
            rank.heard_s += seconds
            rank.moved_s += seconds

    def renew(self, devices: Iterable[int], now: float) -> None:
        """These have something new to do, so that standing still begins anew."""
        for device in devices:
            if device in self._ranks:
                self._ranks[device].moved_s = now

    def step(self, seconds: float) -> None:
        """A step took so long."""
        self._steps.append(seconds)

    def last_alive_s(self, device: int) -> float:
        """When a device last got on."""
        return self._ranks[device].moved_s

    def hung(self, now: float) -> list[int]:
        """Devices that hang."""
        limit, patience = self.limit_s, max(BUSY_S, self.limit_s)
        return [
            device
            for device, rank in self._ranks.items()
            if now - rank.heard_s > (limit if rank.has_spoken else patience)
            or (not rank.is_waiting and now - rank.moved_s > self._patience(rank))
        ]

    def _patience(self, rank: _Rank) -> float:
        # How long a step takes is not known before the first: it may well compile.
        if rank.is_busy or (self._given_s is None and not self._steps):
            return max(BUSY_S, self.limit_s)
        return self.limit_s if rank.has_worked else max(LEAST_S, self.limit_s)

    def is_stalled(self, now: float) -> bool:
        """Whether all wait for each other, and have for too long."""
        ranks = self._ranks.values()
        return bool(ranks) and all(rank.is_waiting and now - rank.moved_s > self.limit_s for rank in ranks)
