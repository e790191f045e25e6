"""Where the time of a job's devices goes, and how much of it is useful. Pure Python.

May import errors and layout only.
"""

from uneven.goodput.book import Account, Book, Tokens, read_book
from uneven.goodput.clock import DeviceClock
from uneven.goodput.events import Event, read_events
from uneven.goodput.kinds import KINDS, Kind, Seconds
from uneven.goodput.ledger import Ledger
from uneven.goodput.report import MAX_UNACCOUNTED, DeviceTime, Report, read_run
from uneven.goodput.timeline import Timeline

__all__ = [
    "KINDS",
    "MAX_UNACCOUNTED",
    "Account",
    "Book",
    "DeviceClock",
    "DeviceTime",
    "Event",
    "Kind",
    "Ledger",
    "Report",
    "Seconds",
    "Timeline",
    "Tokens",
    "read_book",
    "read_events",
    "read_run",
]
