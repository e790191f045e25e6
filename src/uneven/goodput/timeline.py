"""When each device did what: the differences of a book's lines, in bins of equal length."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from uneven.goodput.book import Account, Book
from uneven.goodput.kinds import KINDS, Kind, Seconds, every_kind

NUM_BINS = 240
"""About as many as there is room for in a picture."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What a device did from `start_s` to `stop_s`, in no known order."""

    device: int
    start_s: float
    stop_s: float
    seconds: Seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds by kind of each device in bins of `bin_s`. What is not allocated or not accounted for is in none."""

    bin_s: float
    num_bins: int
    devices: dict[int, tuple[dict[Kind, float], ...]]

    @classmethod
    def of(cls, book: Book, *, num_bins: int = NUM_BINS) -> Self:
        """From the start of the job to what the book knows."""
        bin_s = book.time_s / num_bins
        devices: dict[int, tuple[dict[Kind, float], ...]] = {}
        for part in slices_of(book):
            if part.device not in devices:
                devices[part.device] = tuple(every_kind({}) for _ in range(num_bins))
            _spread(part, devices[part.device], bin_s=bin_s)
        return cls(bin_s, num_bins, dict(sorted(devices.items())))


def slices_of(book: Book) -> Iterator[Slice]:
    """Between any two lines of an incarnation, and before its first; each as long as its seconds.

    Seconds that turn out to be of another kind later (lost work, idle waiting) stand where that was found out.
    """
    last: dict[tuple[int, int], Account] = {}
    for account in book.history:
        key = (account.device, account.incarnation)
        before = last.get(key, Account(*key, account.began_s, account.began_s, {}))
        last[key] = account
        length_s = account.until_s - before.until_s
        if length_s <= 0:
            continue
        seconds = {kind: account.seconds.get(kind, 0.0) - before.seconds.get(kind, 0.0) for kind in KINDS}
        gained = {kind: more for kind, more in seconds.items() if more > 0}
        scale = min(1.0, length_s / sum(gained.values())) if gained else 0.0
        yield Slice(
            account.device, before.until_s, account.until_s, {kind: more * scale for kind, more in gained.items()}
        )


def _spread(part: Slice, bins: tuple[dict[Kind, float], ...], *, bin_s: float) -> None:
    first = min(int(part.start_s / bin_s), len(bins) - 1)
    for index in range(first, len(bins)):
        if index * bin_s >= part.stop_s:
            break
        overlap_s = max(0.0, min(part.stop_s, (index + 1) * bin_s) - max(part.start_s, index * bin_s))
        for kind, seconds in part.seconds.items():
            bins[index][kind] += seconds * overlap_s / (part.stop_s - part.start_s)
