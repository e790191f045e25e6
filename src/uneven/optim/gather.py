"""Bring the updated elements of every shard to those who hold the elements but do not keep the shard."""

from collections.abc import Iterable, Mapping
from typing import final

import torch

from uneven.comm import World
from uneven.layout import Members, StateShard
from uneven.optim.bundle import EndToEnd

PURPOSE = "params"


@final
class ParameterGather:
    """One exchange between all ranks for all shards. Constructed and called by every rank."""

    def __init__(self, shards: Iterable[StateShard], world: World) -> None:
        moves = [(shard, source, destination) for shard in shards for source, destination in shard.transfers()]
        # Whether anything moves follows from the plan: all ranks take this branch, or none.
        self._group = world.everyone(purpose=PURPOSE) if moves else None
        mine, peers = world.device, world.devices
        self._outgoing = [[shard for shard, *ends in moves if ends == [mine, peer]] for peer in peers]
        self._incoming = [[shard for shard, *ends in moves if ends == [peer, mine]] for peer in peers]

    def run(self, flats: Mapping[Members, EndToEnd], *, dtype: torch.dtype) -> None:
        """Overwrite, in `flats`, each shard that isn't kept here with what a holder has; elements travel as `dtype`."""
        if self._group is None:
            return
        send, outgoing = _parts(flats, self._outgoing)
        receive, incoming = _parts(flats, self._incoming)
        device = next(iter(flats.values())).tensors[0].device
        message = torch.empty(sum(send), dtype=dtype, device=device)
        for slot, part in zip(message.split([part.numel() for part in outgoing]), outgoing, strict=True):
            slot.copy_(part)
        arrived = self._group.all_to_all(message, send=send, receive=receive)
        for slot, part in zip(arrived.split([part.numel() for part in incoming]), incoming, strict=True):
            part.copy_(slot)


def _parts(
    flats: Mapping[Members, EndToEnd], shards_by_rank: list[list[StateShard]]
) -> tuple[list[int], list[torch.Tensor]]:
    """How many elements go to, or come from, each rank, and the views that they are in, in that order."""
    counts = [sum(shard.num_elements for shard in shards) for shards in shards_by_rank]
    shards = [shard for each in shards_by_rank for shard in each]
    return counts, [part for shard in shards for part in flats[shard.members].cut(shard.start, shard.stop)]
