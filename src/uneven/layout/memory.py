"""How much memory a device needs for weights, gradients and optimizer state, under a plan and while it changes.

Activations and what libraries take are not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from uneven.layout.grouping import groups_of
from uneven.layout.plan import ParallelPlan
from uneven.layout.segments import bundle_sizes
from uneven.layout.shards import Copies, shards_of


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """What an element takes as a weight, as a gradient, and as optimizer state."""

    weight: int
    gradient: int
    state: int

    @classmethod
    def of(cls, precision: str) -> "ElementBytes":
        """Of "bf16", "fp32" or "fp64": two moments, and a master copy of a bf16 weight, in fp32 or fp64."""
        return {"bf16": cls(2, 4, 12), "fp32": cls(4, 4, 8), "fp64": cls(8, 8, 16)}[precision]


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one device."""

    weights: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.states

    def moving_to(self, after: "Need", *, is_same_layout: bool) -> int:
        """While this becomes `after`: gradients are given up, and both states are there until all have what they need.

        Weights too, unless the device's layout stays the same.
        """
        weights = after.weights if is_same_layout else self.weights + after.weights
        return weights + self.states + after.states


def needs(plan: ParallelPlan, *, copies: Copies, bytes_of: ElementBytes) -> dict[int, Need]:
    """What each device of a plan needs for a step."""
    gradients = dict.fromkeys(plan.devices, 0)
    sizes = bundle_sizes(plan)
    for members, group in groups_of(plan).items():
        for device in group:
            gradients[device] += sizes[members]
    states = dict.fromkeys(plan.devices, 0)
    for shard in shards_of(plan, copies):
        for holder in shard.holders:
            states[holder] += shard.num_elements
    return {
        device: Need(
            plan.layout_of(device).local_elements(device) * bytes_of.weight,
            gradients[device] * bytes_of.gradient,
            states[device] * bytes_of.state,
        )
        for device in plan.devices
    }


def shortfall(
    before: ParallelPlan | None,
    plan: ParallelPlan,
    *,
    memory: Mapping[int, int],
    copies: Copies,
    bytes_of: ElementBytes,
) -> str:
    """Which device has too little memory for a plan, or for the way to it from the one before; "" if none has."""
    needed = needs(plan, copies=copies, bytes_of=bytes_of)
    had = {} if before is None else needs(before, copies=copies, bytes_of=bytes_of)
    for device, need in needed.items():
        moving = 0
        if before is not None and device in had:
            is_same = before.layout_of(device) == plan.layout_of(device)
            moving = had[device].moving_to(need, is_same_layout=is_same)
        most = max(need.total, moving)
        if most > memory[device]:
            what = "to move there" if moving > need.total else "for weights, gradients and optimizer state"
            return f"device {device} needs {most:,} bytes {what}, and has {memory[device]:,}"
    return ""
