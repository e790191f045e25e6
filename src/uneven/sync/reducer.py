"""Sum gradients over replicas of unlike layouts while backward is still running, without resharding anything.

Every device of every replica takes part at its full bandwidth, and sends what an ordinary data-parallel all-reduce
of its own gradients sends. Collectives only sum; the loss is already divided by the global number of tokens.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import nn

from uneven.comm import Pending, World
from uneven.errors import InputError, LayoutError
from uneven.layout import MAX_GROUPS_PER_DEVICE, ParallelPlan
from uneven.reshard import Tiles
from uneven.sync.buckets import PURPOSE, Bucket, Piece, build_buckets

BUCKET_BYTES = 25 * 2**20
NORM_BLOCK = 4096


@final
class Gradients:
    """The reduced gradients of this rank's part of the model.

    Valid until the reducer's next `begin`. `tiles` are the same views of them in every step.
    """

    def __init__(self, buckets: tuple[Bucket, ...], world: World, *, tiles: Tiles) -> None:
        self.tiles = tiles
        self._buckets = buckets
        self._world = world

    def squared_norm(self) -> torch.Tensor:
        """This rank's part of the squared global norm, float64: each element counts on the first of its group."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.torch_device)
        for bucket in self._buckets:
            for buffer in bucket.buffers:
                if buffer.group.rank == 0:
                    total += _squared_norm(buffer.flat)
        return total

    def norm(self) -> float:
        """The global gradient norm, the same on every rank; called by all ranks."""
        total = self._world.everyone(purpose="norm").all_reduce(self.squared_norm())
        return float(total.sqrt())

    def clip(self, max_norm: float, *, norm: float) -> None:
        """Scale all gradients so that the global norm, now `norm`, is at most `max_norm`."""
        if norm > max_norm:
            for bucket in self._buckets:
                for buffer in bucket.buffers:
                    buffer.flat.mul_(max_norm / norm)

    def by_name(self) -> dict[str, torch.Tensor]:
        """Gradients of the local shapes, in the reduction's precision."""
        return {name: _assemble(pieces) for bucket in self._buckets for name, pieces in bucket.pieces.items() if pieces}


def _squared_norm(flat: torch.Tensor) -> torch.Tensor:
    """Float64, from the norms of blocks: 1e-8 from a sum in float64, which takes a copy and 8 to 20 times as long."""
    blocks, rest = flat.split([flat.numel() // NORM_BLOCK * NORM_BLOCK, flat.numel() % NORM_BLOCK])
    norms = torch.linalg.vector_norm(blocks.view(-1, NORM_BLOCK), dim=1)
    return torch.cat([norms, torch.linalg.vector_norm(rest).view(1)]).double().square().sum()


def _assemble(pieces: tuple[Piece, ...]) -> torch.Tensor:
    if len(pieces) == 1:
        return pieces[0].tile.view
    ordered = [piece.tile for piece in sorted(pieces, key=lambda piece: piece.start)]
    return torch.cat([tile.view for tile in ordered], dim=ordered[0].dim)


@final
class GradReducer:
    """Collects the gradients of a divided model and reduces them over all replicas, bucket by bucket, in backward.

    Constructed by every rank. A step is `begin(num_backwards)`, that many backward passes (replicas may differ, and
    may have none), then `finish()`. Between them a parameter's `.grad` is taken into the buffers and set to None.
    Gradients accumulate and reduce in fp32, or fp64 for a model in fp64. A backward pass beyond those announced raises
    InputError, since its gradients would miss the sum. A device joins at most `max_groups` groups.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ParallelPlan,
        *,
        world: World,
        bucket_bytes: int = BUCKET_BYTES,
        max_groups: int = MAX_GROUPS_PER_DEVICE,
    ) -> None:
        if set(plan.devices) != set(world.devices):
            raise LayoutError(f"the plan has the devices {list(plan.devices)}, this job {list(world.devices)}")
        parameters = dict(model.named_parameters())
        is_double = any(parameter.dtype == torch.float64 for parameter in parameters.values())
        self._world = world
        self._buckets = build_buckets(
            plan,
            world,
            bucket_bytes=bucket_bytes,
            max_groups=max_groups,
            dtype=torch.float64 if is_double else torch.float32,
        )
        self._tiles: Tiles = {
            name: tuple(piece.tile for piece in pieces)
            for bucket in self._buckets
            for name, pieces in bucket.pieces.items()
        }
        self._num_backwards = 0
        self._missing: list[int] = []
        self._pending: list[Pending] = []
        self._next = 0
        self._has_gradients = False
        self._hooks = [
            parameters[name].register_post_accumulate_grad_hook(self._collector(index, pieces))
            for index, bucket in enumerate(self._buckets)
            for name, pieces in bucket.pieces.items()
            if pieces
        ]

    def begin(self, num_backwards: int = 1) -> None:
        """Start a step of `num_backwards` backward passes on this rank: clear the sums of the last one."""
        for bucket in self._buckets:
            for buffer in bucket.buffers:
                buffer.flat.zero_()
        self._num_backwards = num_backwards
        self._missing = [
            num_backwards * sum(1 for pieces in bucket.pieces.values() if pieces) for bucket in self._buckets
        ]
        self._pending = []
        self._next = 0
        self._has_gradients = False

    def finish(self) -> Gradients:
        """Reduce what backward has not, wait for everything, and return the sums over all replicas."""
        self._world.pulse.reach("sync")
        while self._next < len(self._buckets):
            self._launch()
        for pending in self._pending:
            pending.wait()
        return Gradients(self._buckets, self._world, tiles=self._tiles)

    def close(self) -> None:
        """Leave the model's gradients alone from now on."""
        for hook in self._hooks:
            hook.remove()

    @property
    def sent_bytes(self) -> float:
        """What this rank has sent for gradients so far."""
        return float(self._world.traffic.sent_bytes(PURPOSE))

    def _collector(self, index: int, pieces: tuple[Piece, ...]) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            if parameter.grad is None:
                return
            if not self._missing or self._missing[index] == 0:
                raise InputError(
                    f"a gradient came after all {self._num_backwards} backward passes that begin() was told of; "
                    f"call begin(num_backwards) once a step, with their number on this rank"
                )
            if not self._has_gradients:
                self._has_gradients = True
                self._world.pulse.reach("backward")
            for piece in pieces:
                if piece.is_counted:
                    piece.tile.view.add_(piece.of(parameter.grad))
            parameter.grad = None
            self._missing[index] -= 1
            # A bucket waits for the one before it, so that the order is the same on every rank.
            while self._next < len(self._buckets) and self._missing[self._next] == 0:
                self._launch()

        return collect

    def _launch(self) -> None:
        for buffer in self._buckets[self._next].buffers:
            self._pending.append(buffer.group.start_all_reduce(buffer.flat))
        self._next += 1
