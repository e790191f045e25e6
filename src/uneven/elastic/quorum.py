"""Who takes part in a job, from which generation on, and under which plan: what a coordinator tells its members."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from uneven.elastic.difference import Difference
from uneven.layout import ParallelPlan


@dataclass(frozen=True, slots=True)
class Quorum:
    """Generation `generation`: `members` move what is needed to where `plan` wants it; then those of the plan go on.

    Members that are not in the plan leave. A planned quorum is entered at the next step boundary, others at once.
    `checkpoint` is what to start from if the members together do not have the whole state; None: the initial weights.
    `plans` are those of the generations that members may have come from. Steps up to `furthest` were committed before.
    """

    generation: int
    members: tuple[int, ...]
    plan: ParallelPlan
    is_planned: bool = False
    checkpoint: Path | None = None
    plans: Mapping[int, ParallelPlan] = field(default_factory=dict)
    furthest: int = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """A member's word that it has entered a generation, after `step` committed steps; by all members, in any order.

    `moved_bytes` is what it received. `is_redone` says that an attempt at the next step was lost. `reason` says why the
    state is not that of the members before, "" if it is.
    """

    generation: int
    step: int
    moved_bytes: int
    is_redone: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Spent:
    """After `step` committed steps, how a member has spent its time since its process began (`DeviceClock.totals`).

    `at_s` is when it says so, by the monotonic clock of its host.
    """

    step: int
    at_s: float
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Over:
    """To members that wait for a quorum: there will be none, since others have finished."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A member's first word: it can enter a quorum."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A member's word that an operation of a generation failed: it waits for the next one."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class Differs:
    """A member's word that devices have other bits than they should. While they are expelled, members wait for it."""

    generation: int
    step: int
    differences: tuple[Difference, ...]
    is_expelling: bool


@dataclass(frozen=True, slots=True)
class Wish:
    """A member's wish to leave at the next step boundary."""
