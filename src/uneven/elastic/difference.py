"""Who has other numbers than those who should have the same. Loads no torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from uneven.layout import Members


@dataclass(frozen=True, slots=True)
class Difference:
    """`devices` differ from the majority of `members`; not `is_certain` where there is none, and all are named."""

    members: Members
    devices: tuple[int, ...]
    is_certain: bool


def judge(values: Mapping[int, float]) -> Difference | None:
    """Which devices have another value than most; None if all have the same. A number that is none equals itself."""
    told = {device: repr(value) for device, value in values.items()}
    (value, count), *others = Counter(told.values()).most_common()
    if not others:
        return None
    is_certain = count > len(told) / 2
    devices = tuple(device for device, each in told.items() if each != value or not is_certain)
    return Difference(tuple(values), devices, is_certain)
