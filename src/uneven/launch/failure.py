"""What ends a job, as a value: it crosses from a rank to its launcher, and from host to host. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from uneven.errors import HostLost, InputError, Interrupted, RankFailed, UnevenError

TOLD_AS_THEMSELVES = MappingProxyType({"input": InputError, "interrupted": Interrupted, "host": HostLost})
"""Kinds of error that keep their meaning on the way to another host; all others arrive as RankFailed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank or launcher ended: when (seconds since the epoch), its traceback, its error if one of ours.

    The earliest is the cause: hosts keep their clocks together better than a message of unknown delay would tell. Time
    0 is that of an end without a word: its peers' errors are consequences.
    """

    time_s: float
    text: str
    error: UnevenError | None = None

    @property
    def kind(self) -> str:
        """One of TOLD_AS_THEMSELVES, or ""."""
        return next((kind for kind, type_ in TOLD_AS_THEMSELVES.items() if isinstance(self.error, type_)), "")

    def as_error(self) -> UnevenError:
        """What a launcher raises over it."""
        if self.kind and self.error is not None:
            return self.error
        failed = RankFailed(self.text.rstrip())
        failed.__cause__ = self.error
        return failed

    def to_json(self) -> dict[str, Any]:
        """For another host."""
        return {"time_s": self.time_s, "kind": self.kind, "text": str(self.error) if self.kind else self.text}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Failure":
        """From another host: an error of ours keeps its kind, and no more."""
        type_ = TOLD_AS_THEMSELVES.get(values["kind"])
        return cls(values["time_s"], values["text"], None if type_ is None else type_(values["text"]))
