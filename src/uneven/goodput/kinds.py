"""What a second of a device can be spent on. Every second has one kind; there is none for the rest.

Imports errors only.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from uneven.errors import GoodputError

Kind = Literal[
    "useful",
    "idle",
    "communication",
    "detection",
    "recovery",
    "reshard",
    "repeated",
    "checkpoint",
    "startup",
    "data",
    "absent",
]
Seconds = Mapping[Kind, float]
"""Seconds by kind; a kind that is missing has none."""

KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        "useful": "busy with steps that were committed, or with the held-out loss",
        "idle": "waiting for a slower peer",
        "communication": "waiting for bytes, all peers being there",
        "detection": "from a failure until it was noticed",
        "recovery": "from then on until the job went on, but for moves",
        "reshard": "moving weights and state to another plan",
        "repeated": "work that was lost, and done or to be done again",
        "checkpoint": "reading or writing weights and state",
        "startup": "from the start of a process to its first step",
        "data": "waiting for samples",
        "absent": "dead, or out of the job",
    }
)
"""In the order of tables and pictures, each in a few words."""

TENTATIVE: frozenset[Kind] = frozenset({"useful", "idle", "communication", "data"})
"""Kinds of a step's seconds, which are lost if the step is not committed."""
BUSY: frozenset[Kind] = frozenset({"useful", "data"})
"""Kinds of a step in which a device does its own part, and may keep others waiting."""


def check_kinds(names: Iterable[str], *, where: str) -> None:
    """Raise GoodputError for a name that is no kind."""
    for name in names:
        if name not in KINDS:
            raise GoodputError(f"{where}: {name!r} is no kind of time; expected one of {', '.join(KINDS)}")


def every_kind(seconds: Seconds) -> dict[Kind, float]:
    """The same with all kinds, in order."""
    return {kind: seconds.get(kind, 0.0) for kind in KINDS}
