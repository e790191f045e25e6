"""Sets of elements along one dimension, as ascending ranges that neither touch nor overlap."""

from collections.abc import Iterable

from uneven.layout.partition import Interval

Ranges = tuple[Interval, ...]


def union(ranges: Iterable[Interval]) -> Ranges:
    """All elements of some ranges, in any order, that may overlap."""
    found: list[Interval] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def common(first: Iterable[Interval], second: Iterable[Interval]) -> Ranges:
    """What lies in both."""
    second = tuple(second)
    return union((max(a, c), min(b, d)) for a, b in first for c, d in second if max(a, c) < min(b, d))


def without(first: Iterable[Interval], second: Iterable[Interval]) -> Ranges:
    """What of the first is not in the second."""
    rest = union(first)
    for start, stop in union(second):
        rest = tuple(part for a, b in rest for part in ((a, min(b, start)), (max(a, stop), b)) if part[0] < part[1])
    return rest


def length(ranges: Iterable[Interval]) -> int:
    """How many elements."""
    return sum(stop - start for start, stop in ranges)
