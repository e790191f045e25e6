"""What happened in a job, and when: failures, recoveries, moves. One JSON object a line in `events.jsonl`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from uneven.errors import GoodputError
from uneven.goodput.book import read_lines

FILE = "events.jsonl"
"""The events' name in a run's folder."""


@dataclass(frozen=True, slots=True)
class Event:
    """`time_s` is of the job, as in the book. `kind` is `failure`, `recovery`, `join`, `drain`, `reshard`,
    `checkpoint`, `hang` or any other word.

    Of a recovery: how long after the failure it was noticed, how long after that the job went on, and what was moved.
    `text` is for a reader.
    """

    time_s: float
    kind: str
    device: int | None = None
    step: int | None = None
    detect_s: float | None = None
    recover_s: float | None = None
    bytes_moved: int | None = None
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """Without what is not known."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in found.items() if value not in (None, "")}

    @property
    def line(self) -> str:
        """For a terminal."""
        parts = [self.kind if self.device is None else f"{self.kind} of device {self.device}"]
        if self.step is not None:
            parts[0] += f" after step {self.step}"
        if self.detect_s is not None:
            parts.append(f"noticed after {self.detect_s:.2f} s")
        if self.recover_s is not None:
            parts.append(f"settled after {self.recover_s:.2f} s, {(self.bytes_moved or 0) / 1e6:.1f} MB moved")
        return ", ".join([*parts, *([self.text.splitlines()[0]] if self.text else [])])

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Fields of other versions are left out. Raises GoodputError for one that is no number where it has to be."""
        numbers = {name: value.get(name) for name in cls.__slots__ if name not in ("kind", "time_s", "text")}
        needed = {"time_s": value.get("time_s")}
        for name, number in {**needed, **{name: each for name, each in numbers.items() if each is not None}}.items():
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise GoodputError(f"event: {name} has to be a number, found {number!r}")
        if not isinstance(value.get("kind"), str):
            raise GoodputError(f"event: kind has to be a word, found {value.get('kind')!r}")
        return cls(value["time_s"], value["kind"], **numbers, text=str(value.get("text", "")))


def read_events(path: Path) -> tuple[Event, ...]:
    """By time. A file that is not there has none; a cut last line is left out."""
    events = []
    for number, value in read_lines(path) if path.exists() else ():
        try:
            events.append(Event.from_json(value))
        except GoodputError as error:
            raise GoodputError(f"{path}, line {number}: {error}") from None
    return tuple(sorted(events, key=lambda event: event.time_s))
