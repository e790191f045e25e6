"""Where the elements of a segment lie in a holder's local tensor."""

from dataclasses import dataclass
from math import prod

from uneven.layout.model import ModelLayout, ParameterSpec
from uneven.layout.partition import Interval
from uneven.layout.segments import Segment


@dataclass(frozen=True, slots=True)
class Slab:
    """The part of a local tensor that has `shape`: consecutive slices along `dim`, of which the first is `start`.

    `elements` are these slices in the whole parameter.
    """

    dim: int
    start: int
    shape: tuple[int, ...]
    elements: Interval

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def slabs_of(spec: ParameterSpec, segment: Segment, *, layout: ModelLayout, device: int) -> tuple[Slab, ...]:
    """One slab for each range of a segment that `device` holds, in the order of the ranges."""
    held = layout.held(spec, device)
    return tuple(
        Slab(spec.dim, _local_offset(held, start), spec.part_shape(stop - start), (start, stop))
        for start, stop in segment.ranges
    )


def _local_offset(held: tuple[Interval, ...], element: int) -> int:
    """The local index of a full element, among the ranges that a device holds."""
    offset = 0
    for start, stop in held:
        if start <= element < stop:
            return offset + element - start
        offset += stop - start
    raise AssertionError(f"element {element} is not among the ranges {held}")
