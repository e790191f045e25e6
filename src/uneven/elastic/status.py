"""What the members of a quorum tell each other before they go on, and what all of them conclude from it alike."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import torch

from uneven.comm import Group

NUM_VALUES = 8
"""What a commit sums, at most."""
NEVER = -1


@dataclass(frozen=True, slots=True)
class Status:
    """Where a member stands. `adopted` is the generation whose plan its state is under, NEVER without a state.

    `prepared` is a generation for whose plan it has everything, besides; its barrier may have been passed by others.
    `values` are the sums of the commit of `step`, the last one that it has committed and applied.
    """

    adopted: int = NEVER
    prepared: int = NEVER
    step: int = 0
    num_updates: int = 0
    skipped_in_row: int = 0
    is_gathered: bool = True
    values: tuple[float, ...] = (0.0,) * NUM_VALUES

    def to_row(self) -> list[float]:
        *numbers, values = astuple(self)
        return [*map(float, numbers), *values]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "Status":
        adopted, prepared, step, num_updates, skipped, is_gathered, *values = row
        return cls(
            int(adopted), int(prepared), int(step), int(num_updates), int(skipped), bool(is_gathered), tuple(values)
        )


def exchange(mine: Status, *, group: Group) -> dict[int, Status]:
    """The status of every member of the group; called by all of them."""
    width = len(fields(Status)) - 1 + NUM_VALUES
    rows = torch.zeros(group.size, width, dtype=torch.float64, device=group.torch_device)
    rows[group.rank] = torch.tensor(mine.to_row(), dtype=torch.float64)
    found = group.all_reduce(rows).tolist()
    return {device: Status.from_row(row) for device, row in zip(group.devices, found, strict=True)}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from all statuses: whose state counts, the step they are to have committed, with which values.

    `holders` are the devices with a state, and whether they have gathered the parameters of that step.
    """

    adopted: int
    latest: Status
    holders: Mapping[int, bool]

    @classmethod
    def of(cls, statuses: Mapping[int, Status]) -> "Verdict":
        """A plan that anyone has adopted all others have prepared, since none adopts before the barrier of all.

        A step that anyone has committed all others can apply: who has its sums knows that all hold its gradients.
        """
        adopted = max(status.adopted for status in statuses.values())
        if adopted == NEVER:
            return cls(NEVER, Status(), {})
        with_state = {
            device: status for device, status in statuses.items() if adopted in (status.adopted, status.prepared)
        }
        latest = max(with_state.values(), key=lambda status: status.step)
        is_unchanged = not math.isfinite(latest.values[0])
        gathered = {
            # What was prepared is whole; it may not have been adopted yet.
            device: is_unchanged or status.prepared == adopted or (status.is_gathered and status.step == latest.step)
            for device, status in with_state.items()
        }
        return cls(adopted, latest, gathered)
