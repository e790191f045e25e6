"""The book of a job's time: accounts of devices, and how they lie in `goodput.jsonl`, which lives on after a kill.

A header starts each segment of a job, which is resumed by another. Each flush adds a line for every account that
has changed and one for the job's tokens; all are cumulative, so the last of each counts, and differences show when.
Times are seconds of the job: its first segment starts at 0, and each later one where the one before was last seen.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from uneven.errors import GoodputError
from uneven.goodput.kinds import Seconds, check_kinds

FORMAT = "uneven.goodput/1"
FILE = "goodput.jsonl"
"""The book's name in a run's folder."""
DECIMALS = 6


@dataclass(frozen=True, slots=True)
class Account:
    """One process of a device, from its start to `until_s`, and then the device's absence until its next process."""

    device: int
    incarnation: int
    began_s: float
    until_s: float
    seconds: Seconds

    @property
    def wall_s(self) -> float:
        return self.until_s - self.began_s

    @property
    def unaccounted_s(self) -> float:
        """What the launcher has seen pass and the rank does not tell; negative if it tells of more."""
        return self.wall_s - sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "incarnation": self.incarnation,
            "began_s": round(self.began_s, DECIMALS),
            "until_s": round(self.until_s, DECIMALS),
            "seconds": {kind: round(seconds, DECIMALS) for kind, seconds in self.seconds.items() if seconds},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        check_kinds(value["seconds"], where=f"device {value['device']}")
        seconds = {kind: float(seconds) for kind, seconds in value["seconds"].items()}
        times = float(value["began_s"]), float(value["until_s"])
        return cls(int(value["device"]), int(value["incarnation"]), *times, seconds)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Target tokens of committed steps, and of all that was computed for them, lost work included."""

    committed: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Book:
    """All that is known at `time_s`. `history` has every account as often as it was written, in that order."""

    time_s: float
    num_parameters: int
    tokens: Tokens
    history: tuple[Account, ...]
    resumed_s: tuple[float, ...] = ()

    @property
    def accounts(self) -> tuple[Account, ...]:
        """The last word on each incarnation, by device and incarnation."""
        last = {(account.device, account.incarnation): account for account in self.history}
        return tuple(last[key] for key in sorted(last))


def header_line(time_s: float, num_parameters: int) -> dict[str, Any]:
    """What a segment starts with."""
    return {"format": FORMAT, "time_s": round(time_s, DECIMALS), "num_parameters": num_parameters}


def tokens_line(time_s: float, tokens: Tokens) -> dict[str, Any]:
    """What a flush ends with."""
    return {
        "time_s": round(time_s, DECIMALS),
        "committed_tokens": tokens.committed,
        "computed_tokens": tokens.computed,
    }


def read_book(path: Path) -> Book:
    """The book in a file. Raises GoodputError, with the line, for one that is no book; a cut last line is left out."""
    time_s, num_parameters, tokens = 0.0, 0, Tokens()
    history: list[Account] = []
    starts: list[float] = []
    for number, value in read_lines(path):
        try:
            if number == 1 and value.get("format") != FORMAT:
                raise GoodputError(f"expected format {FORMAT!r}, found {value.get('format')!r}")
            if "format" in value:
                time_s, num_parameters = float(value["time_s"]), int(value["num_parameters"])
                starts.append(time_s)
            elif "device" in value:
                history.append(Account.from_json(value))
                time_s = max(time_s, history[-1].until_s)
            else:
                time_s = max(time_s, float(value["time_s"]))
                tokens = Tokens(int(value["committed_tokens"]), int(value["computed_tokens"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise GoodputError(f"{path}, line {number}: {_reason(error)}") from None
    if not starts:
        raise GoodputError(f"{path}: has no whole line; expected a header of format {FORMAT!r}")
    return Book(time_s, num_parameters, tokens, tuple(history), tuple(starts[1:]))


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of each line of a file that may still be written to, or whose writer was killed."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise GoodputError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            value = json.loads(line)
        except ValueError:
            raise GoodputError(f"{path}, line {number}: not JSON: {line[:60]!r}") from None
        if not isinstance(value, dict):
            raise GoodputError(f"{path}, line {number}: expected an object, found {type(value).__name__}")
        yield number, value


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the field {error.args[0]!r} is missing"
    return str(error)
