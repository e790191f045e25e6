"""Faults on purpose: what is to happen to which device, at which point of which step.

The rank says that it has come to the point, and waits there; what happens to it happens from outside.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from uneven.errors import ConfigError

Action = Literal["kill", "hang", "drain", "return"]
Phase = Literal[
    "start-up", "forward", "backward", "sync", "commit", "apply", "gather", "recovery", "reshard", "checkpoint", "join"
]
"""Points of a rank's program. `commit` is before its sum, `apply` after it, `gather` between the two parts of apply."""


@dataclass(frozen=True, slots=True)
class Point:
    """A phase, in the attempt at a step, or whenever it comes first."""

    phase: Phase
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """`action` happens to `device` at a point; `return` starts its process again once others begin that step."""

    action: Action
    device: int
    point: Point

    def __str__(self) -> str:
        step = "" if self.point.step is None else f",step={self.point.step}"
        phase = "" if self.action in ("drain", "return") else f",phase={self.point.phase}"
        return f"{self.action}:device={self.device}{step}{phase}"


@dataclass(frozen=True, slots=True)
class Stops:
    """To a rank: where it shall stop and say so."""

    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Reached:
    """From a rank: it has stopped at a point."""

    point: Point
    step: int


def parse_fault(text: str) -> Fault:
    """`kill:device=2,step=60` or, with a phase, `hang:device=0,step=3,phase=backward`. Raises ConfigError."""
    where = f"--fault {text}"
    action, _, rest = text.partition(":")
    if action not in get_args(Action):
        raise ConfigError(f"{where}: expected one of {', '.join(get_args(Action))} before the colon, found {action!r}")
    values = {}
    for part in rest.split(","):
        key, _, value = part.partition("=")
        if key not in ("device", "step", "phase") or key in values or not value:
            raise ConfigError(f"{where}: expected device=N,step=N and perhaps phase=NAME, each once, found {part!r}")
        values[key] = value
    for key in ("device", "step"):
        if key in values and not re.fullmatch(r"[0-9]+", values[key]):
            raise ConfigError(f"{where}: {key} is a whole number, found {values[key]!r}")
    if "device" not in values or ("step" not in values and "phase" not in values):
        raise ConfigError(f"{where}: a device, and a step or a phase, are needed")
    phase = values.get("phase", "forward")
    if phase not in get_args(Phase):
        raise ConfigError(f"{where}: expected one of the phases {', '.join(get_args(Phase))}, found {phase!r}")
    if action in ("drain", "return") and ("step" not in values or "phase" in values):
        raise ConfigError(f"{where}: a {action} happens between steps: it takes a step and no phase")
    return Fault(action, int(values["device"]), Point(phase, int(values["step"]) if "step" in values else None))
