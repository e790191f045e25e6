"""Where a job's time went, and what came of it: goodput. The same from a running ledger, a file and a simulation.

Training goodput = committed tokens / (ideal tokens per second of the allocated devices × wall time), where n devices
would ideally do n × r, and r is what one device does in a useful second: committed tokens / useful device-seconds.
Over the healthy devices, the seconds of those that are absent don't count as allocated.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from uneven.errors import GoodputError
from uneven.goodput import book as books
from uneven.goodput import events as happenings
from uneven.goodput.book import Account, Book, Tokens, read_book
from uneven.goodput.events import Event, read_events
from uneven.goodput.kinds import KINDS, Kind, Seconds, every_kind

FORMAT = "uneven.goodput-report/1"
MAX_UNACCOUNTED = 0.01
"""More than this part of the time unaccounted for puts all of the numbers in doubt."""
FLOPS_PER_PARAMETER = 6
"""Of a token: 2 in forward, 4 in backward. Kaplan et al., arXiv 2001.08361, section 2.1; attention's products of
queries and keys, and activations that are computed again, come on top and are not counted.
"""


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """All of a device's time in the job, over its incarnations."""

    device: int
    num_incarnations: int
    wall_s: float
    until_s: float
    seconds: Seconds
    unaccounted_s: float

    @classmethod
    def of(cls, accounts: list[Account]) -> Self:
        """Unaccounted seconds are sums of amounts: what one process lacks does not hide what another has too much."""
        return cls(
            device=accounts[0].device,
            num_incarnations=len(accounts),
            wall_s=sum(account.wall_s for account in accounts),
            until_s=accounts[-1].until_s,
            seconds=add_seconds(account.seconds for account in accounts),
            unaccounted_s=sum(abs(account.unaccounted_s) for account in accounts),
        )

    @property
    def goodput(self) -> float:
        return ratio(self.seconds["useful"], self.wall_s)


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers of a job up to `wall_s`. A ratio of nothing to nothing is 0."""

    wall_s: float
    num_parameters: int
    tokens: Tokens
    devices: tuple[DeviceTime, ...]
    events: tuple[Event, ...] = ()

    @classmethod
    def of(cls, book: Book, events: Iterable[Event] = ()) -> Self:
        """The report of what a book holds."""
        accounts: dict[int, list[Account]] = {}
        for account in book.accounts:
            accounts.setdefault(account.device, []).append(account)
        devices = tuple(DeviceTime.of(each) for each in accounts.values())
        return cls(book.time_s, book.num_parameters, book.tokens, devices, tuple(events))

    @property
    def seconds(self) -> dict[Kind, float]:
        """Device-seconds by kind, of all devices."""
        return add_seconds(device.seconds for device in self.devices)

    @property
    def allocated_s(self) -> float:
        """Device-seconds from each device's first start on."""
        return sum(device.wall_s for device in self.devices)

    @property
    def healthy_s(self) -> float:
        """Allocated device-seconds in which the device was there."""
        return self.allocated_s - self.seconds["absent"]

    @property
    def unaccounted_s(self) -> float:
        return sum(device.unaccounted_s for device in self.devices)

    @property
    def unaccounted(self) -> float:
        """As a part of the allocated time."""
        return ratio(self.unaccounted_s, self.allocated_s)

    @property
    def goodput_allocated(self) -> float:
        """committed / (r × allocated device-seconds), with r = committed / useful device-seconds: committed cancels."""
        return ratio(self.seconds["useful"], self.allocated_s)

    @property
    def goodput_healthy(self) -> float:
        """committed / (r × healthy device-seconds)."""
        return ratio(self.seconds["useful"], self.healthy_s)

    @property
    def device_tokens_per_s(self) -> float:
        """r: committed tokens of one device in a useful second, the mean over the job's devices."""
        return ratio(self.tokens.committed, self.seconds["useful"])

    @property
    def useful_tokens(self) -> float:
        """Committed over computed tokens, and as well FLOPs, which are in proportion."""
        return ratio(self.tokens.committed, self.tokens.computed)

    def flops(self, tokens: int) -> int:
        """What computing so many tokens takes, by the usual estimate."""
        return FLOPS_PER_PARAMETER * self.num_parameters * tokens

    def to_json(self) -> dict[str, Any]:
        """A stable interface: fields may be added, none changes or goes."""
        tokens = self.tokens
        return {
            "format": FORMAT,
            "wall_s": self.wall_s,
            "num_devices": len(self.devices),
            "num_parameters": self.num_parameters,
            "goodput": {"allocated": self.goodput_allocated, "healthy": self.goodput_healthy},
            "device_s": {
                "allocated": self.allocated_s,
                "healthy": self.healthy_s,
                "unaccounted": self.unaccounted_s,
            },
            "unaccounted": self.unaccounted,
            "seconds": self.seconds,
            "shares": {kind: ratio(seconds, self.allocated_s) for kind, seconds in self.seconds.items()},
            "tokens": {"committed": tokens.committed, "computed": tokens.computed, "useful": self.useful_tokens},
            "flops": {"committed": self.flops(tokens.committed), "computed": self.flops(tokens.computed)},
            "tokens_per_s": ratio(tokens.committed, self.wall_s),
            "device_tokens_per_s": self.device_tokens_per_s,
            "devices": [
                {
                    "device": device.device,
                    "incarnations": device.num_incarnations,
                    "wall_s": device.wall_s,
                    "until_s": device.until_s,
                    "goodput": device.goodput,
                    "seconds": dict(device.seconds),
                    "unaccounted_s": device.unaccounted_s,
                }
                for device in self.devices
            ],
            "events": [event.to_json() for event in self.events],
        }


def read_run(folder: Path) -> tuple[Book, Report]:
    """A run's book and report, be it over, going on or killed. Raises GoodputError for a folder without them."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise GoodputError(f"{folder}: {found}; expected the folder of a run")
    path = folder / books.FILE
    if not path.is_file():
        raise GoodputError(f"{folder}: has no {books.FILE}; expected the folder of a run of `uneven train`")
    book = read_book(path)
    return book, Report.of(book, read_events(folder / happenings.FILE))


def add_seconds(all_seconds: Iterable[Seconds]) -> dict[Kind, float]:
    """Sums by kind, all kinds in order."""
    total = every_kind({})
    for seconds in all_seconds:
        for kind in KINDS:
            total[kind] += seconds.get(kind, 0.0)
    return total


def ratio(part: float, whole: float) -> float:
    """`part` of `whole`; 0 of nothing."""
    return part / whole if whole else 0.0
