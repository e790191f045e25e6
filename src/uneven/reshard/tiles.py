"""Where elements of the undivided parameters lie in local tensors.

A tile is a view of consecutive slices of one parameter. Parameters, gradients and optimizer state are all told as
tiles, so what moves one of them moves any.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from uneven.layout import Interval, ParameterSpec, Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """The slices `start` to `stop` of a parameter along `dim`, in `view`, which has that many."""

    start: int
    stop: int
    dim: int
    view: torch.Tensor

    def part(self, start: int, stop: int) -> torch.Tensor:
        """The view of some of its slices."""
        return self.view.narrow(self.dim, start - self.start, stop - start)


Tiles = Mapping[str, Sequence[Tile]]
"""By parameter."""


def tiles_of(local: torch.Tensor, spec: ParameterSpec, *, ranges: Ranges) -> tuple[Tile, ...]:
    """The tiles of a tensor that has `ranges` of a parameter end to end along its `dim`."""
    tiles, offset = [], 0
    for start, stop in ranges:
        tiles.append(Tile(start, stop, spec.dim, local.narrow(spec.dim, offset, stop - start)))
        offset += stop - start
    return tuple(tiles)


def flat_tiles(flat: torch.Tensor, parts: Sequence[tuple[ParameterSpec, Ranges]]) -> dict[str, tuple[Tile, ...]]:
    """The tiles of a flat tensor that has parts of parameters end to end, each range of slices by itself."""
    tiles: dict[str, list[Tile]] = {}
    offset = 0
    for spec, ranges in parts:
        for start, stop in ranges:
            shape = spec.part_shape(stop - start)
            view = flat[offset : offset + prod(shape)].view(shape)
            tiles.setdefault(spec.name, []).append(Tile(start, stop, spec.dim, view))
            offset += prod(shape)
    return {name: tuple(found) for name, found in tiles.items()}


def cut(tiles: Sequence[Tile], ranges: Ranges) -> Iterator[tuple[Interval, torch.Tensor]]:
    """What the tiles have of some ranges: the slices, and the view of them."""
    for first, last in ranges:
        for tile in tiles:
            start, stop = max(first, tile.start), min(last, tile.stop)
            if start < stop:
                yield (start, stop), tile.part(start, stop)


def copy_common(source: Tiles, target: Tiles) -> None:
    """Copy, for every parameter, the elements that are in both."""
    for name, tiles in target.items():
        for tile in tiles:
            for (start, stop), view in cut(source.get(name, ()), ((tile.start, tile.stop),)):
                tile.part(start, stop).copy_(view)
