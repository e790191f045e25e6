"""Carry out transfers: each rank packs what it sends, one exchange between all moves it, each rank unpacks.

The one collective used is the one that gloo and NCCL both have for parts of unlike sizes. In a message the slices of
a transfer lie as they do in the undivided parameter, however sender and receiver have cut them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import torch

from uneven.comm import Group
from uneven.layout import Transfer
from uneven.reshard.tiles import Tiles, cut

BATCH_ELEMENTS = 1 << 26
"""What all ranks together move at a time, at most, if no single transfer is larger: bounds the messages' memory."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A range of a transfer in a message: its shape, and the views that it is packed from or unpacked into."""

    shape: tuple[int, ...]
    dim: int
    views: tuple[tuple[int, torch.Tensor], ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def pairs(self, message: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each view with its place in the block's part of a flat message."""
        block = message.view(self.shape)
        for offset, view in self.views:
            yield block.narrow(self.dim, offset, view.shape[self.dim]), view


@dataclass(frozen=True, slots=True)
class _Batch:
    """One exchange: for each rank the blocks that go to it, and those that come from it."""

    outgoing: tuple[tuple[_Block, ...], ...]
    incoming: tuple[tuple[_Block, ...], ...]


@final
class Exchange:
    """Transfers between the devices of a group, from tiles of one set into tiles of another; may run many times.

    Run by every device of the group, with the same transfers, of which there is at least one.
    """

    def __init__(self, moves: Sequence[Transfer], *, source: Tiles, target: Tiles, group: Group) -> None:
        self._group = group
        self._batches = []
        device = group.devices[group.rank]
        for batch in _batches(moves):
            mine = [move for move in batch if move.source == device]
            theirs = [move for move in batch if move.destination == device]
            self._batches.append(
                _Batch(
                    tuple(_blocks([m for m in mine if m.destination == peer], source) for peer in group.devices),
                    tuple(_blocks([m for m in theirs if m.source == peer], target) for peer in group.devices),
                )
            )

    @torch.no_grad()
    def run(self, *, dtype: torch.dtype) -> None:
        """Move everything; elements travel as `dtype`."""
        for batch in self._batches:
            send, receive = _counts(batch.outgoing), _counts(batch.incoming)
            message = torch.empty(sum(send), dtype=dtype, device=self._group.torch_device)
            for block, part in _places(batch.outgoing, message):
                for place, view in block.pairs(part):
                    place.copy_(view)
            arrived = self._group.all_to_all(message, send=send, receive=receive)
            for block, part in _places(batch.incoming, arrived):
                for place, view in block.pairs(part):
                    view.copy_(place)


def _batches(moves: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    batch: list[Transfer] = []
    size = 0
    for move in moves:
        if batch and size + move.num_elements > BATCH_ELEMENTS:
            yield batch
            batch, size = [], 0
        batch.append(move)
        size += move.num_elements
    if batch:
        yield batch


def _blocks(moves: Sequence[Transfer], tiles: Tiles) -> tuple[_Block, ...]:
    return tuple(
        _Block(
            move.spec.part_shape(stop - start),
            move.spec.dim,
            tuple((first - start, view) for (first, _), view in cut(tiles[move.spec.name], ((start, stop),))),
        )
        for move in moves
        for start, stop in move.ranges
    )


def _counts(blocks_by_rank: Sequence[Sequence[_Block]]) -> list[int]:
    return [sum(block.num_elements for block in blocks) for blocks in blocks_by_rank]


def _places(blocks_by_rank: Sequence[Sequence[_Block]], message: torch.Tensor) -> Iterator[tuple[_Block, torch.Tensor]]:
    """Each block with its part of a message, which has those of rank 0 first."""
    blocks = [block for each in blocks_by_rank for block in each]
    return zip(blocks, message.split([block.num_elements for block in blocks]), strict=True)
