"""A group of devices that communicate: the collectives this package uses, counted, each the identity in a group of one.

Every member calls the same operations of a group in the same order.
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from uneven.comm.traffic import Operation, Traffic


@final
class Pending:
    """An operation under way; `wait` returns when its result may be read."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()


@final
class Group:
    """The collectives of `devices`, ascending or in the order given; a rank is a position in that order."""

    def __init__(
        self,
        devices: tuple[int, ...],
        *,
        device: int,
        purpose: str,
        traffic: Traffic,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self.devices = devices
        self.rank = devices.index(device)
        self.purpose = purpose
        self._traffic = traffic
        self._process_group = process_group

    @property
    def size(self) -> int:
        return len(self.devices)

    def all_reduce(self, tensor: torch.Tensor, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Sum (or `op`) over the group, in place; returns `tensor`, the same bits on every member."""
        self.start_all_reduce(tensor, op=op).wait()
        return tensor

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Largest over the group, element by element, in place."""
        return self.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def start_all_reduce(self, tensor: torch.Tensor, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """As `all_reduce`, without waiting. `tensor` must be contiguous and stay alive until then."""
        self._record("all_reduce", tensor)
        if self._process_group is None or tensor.numel() == 0:
            return Pending(None)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return Pending(self._process_group.allreduce([tensor], options))

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor to the member at rank `to`, which calls `receive`."""
        if self._process_group is None:
            raise RuntimeError(f"device {self.devices[0]} is alone in its group and can't send to rank {to}")
        self._record("send", tensor)
        # gloo sums tensors of a GPU, but sends only those of the CPU.
        sent = tensor.cpu() if self._is_gloo else tensor
        self._process_group.send([sent], to, 0).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fill a contiguous tensor with what the member at rank `source` sends; returns it."""
        if self._process_group is None:
            raise RuntimeError(f"device {self.devices[0]} is alone in its group and can't receive from rank {source}")
        self._record("receive", tensor)
        received = torch.empty_like(tensor, device="cpu") if self._is_gloo and not tensor.is_cpu else tensor
        self._process_group.recv([received], source, 0).wait()
        return tensor if received is tensor else tensor.copy_(received)

    @property
    def _is_gloo(self) -> bool:
        return isinstance(self._process_group, dist.ProcessGroupGloo)

    def all_to_all(self, tensor: torch.Tensor, *, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Give each member its part of a flat tensor, `send[r]` elements for rank r in that order; get `receive[r]`.

        Returns what came, in the order of ranks. Nothing goes to oneself: a rank's own entries are 0.
        """
        arrived = tensor.new_empty(sum(receive))
        self._record("send", tensor)
        self._record("receive", arrived)
        if self._process_group is not None:
            # The one collective that both gloo and NCCL have for parts of unlike sizes.
            options = dist.AllToAllOptions()
            self._process_group.alltoall_base(arrived, tensor, list(receive), list(send), options).wait()
        return arrived

    def _record(self, operation: Operation, tensor: torch.Tensor) -> None:
        if self.size > 1:
            self._traffic.record(
                self.purpose,
                operation,
                num_bytes=tensor.numel() * tensor.element_size(),
                group_size=self.size,
            )
