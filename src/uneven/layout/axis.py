"""A dimension of a model that may be divided among devices, and the unit that never is."""

from dataclasses import dataclass
from typing import Any

from uneven.errors import LayoutError


def require_whole(where: str, *, least: int = 1, **values: Any) -> None:
    """Raise LayoutError unless every value is a whole number of at least `least`."""
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise LayoutError(f"{where}: {name} must be a whole number of at least {least}, found {value!r}")


@dataclass(frozen=True, slots=True)
class LogicalAxis:
    """`size` elements in units of `unit_size`; the last unit may be short.

    Fixed for a model, whatever the devices: `heads` counts query heads one by one, `mlp` counts channels in
    blocks, `vocab` rows in blocks.
    """

    name: str
    size: int
    unit_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise LayoutError(f"an axis has a name, found {self.name!r}")
        require_whole(f"axis {self.name!r}", size=self.size, unit_size=self.unit_size)

    @property
    def num_units(self) -> int:
        return -(-self.size // self.unit_size)
