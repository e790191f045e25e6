"""A dimension of a model that may be divided among devices, and the unit that never is."""

from dataclasses import dataclass

from uneven.errors import LayoutError


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
        if self.size < 1 or self.unit_size < 1:
            raise LayoutError(
                f"axis {self.name!r}: size {self.size} and unit size {self.unit_size} must both be at least 1"
            )

    @property
    def num_units(self) -> int:
        return -(-self.size // self.unit_size)
