"""A group of devices that communicate: the collectives this package uses, counted, each the identity in a group of one.

Every member calls the same operations of a group in the same order.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from uneven.comm.pulse import Pulse
from uneven.comm.traffic import Operation, Traffic
from uneven.errors import PeerLost

SLICE_S = 0.05
"""How long a rank waits for an operation before it looks whether it has been interrupted."""


@final
class Pending:
    """An operation under way; `wait` returns when its result may be read, or raises PeerLost if there will be none."""

    def __init__(self, work: dist.Work | None, *, group: "Group") -> None:
        self._work = work
        self._group = group

    def wait(self) -> None:
        if self._work is not None:
            with self._group.pulse.wait(self._group.purpose):
                self._group.await_work(self._work)
            self._group.forget(self._work)  # or it would keep its tensors alive


@final
class Group:
    """The collectives of `devices`, ascending or in the order given; a rank is a position in that order.

    It outlives the connections under it: a world that goes on without some of its devices connects it anew.
    """

    def __init__(
        self,
        devices: tuple[int, ...],
        *,
        device: int,
        purpose: str,
        traffic: Traffic,
        pulse: Pulse,
        torch_device: torch.device,
    ) -> None:
        self.devices = devices
        self.rank = devices.index(device)
        self.purpose = purpose
        self.pulse = pulse
        self.torch_device = torch_device
        self.traffic = traffic
        self._process_group: dist.ProcessGroup | None = None
        self._under_way: list[dist.Work] = []

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def is_connected(self) -> bool:
        return self.size == 1 or self._process_group is not None

    def connect(self, process_group: dist.ProcessGroup) -> None:
        """Use these connections from now on."""
        self._process_group = process_group

    def disconnect(self) -> "Abandoned | None":
        """Give the connections up; what may still be at work on them must be kept till it ends."""
        process_group, works = self._process_group, self._under_way
        self._process_group, self._under_way = None, []
        return None if process_group is None else Abandoned(process_group, works)

    def abort(self) -> None:
        """End operations on a GPU, whose waits are not ours to slice. Called by any thread."""
        if self._is_nccl and self._process_group is not None:
            self._process_group.abort()

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
        if self.size == 1 or tensor.numel() == 0:
            return Pending(None, group=self)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._started(self._connections.allreduce([tensor], options))

    def all_to_all(self, tensor: torch.Tensor, *, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        """Give each member its part of a flat tensor, `send[r]` elements for rank r in that order; get `receive[r]`.

        Returns what came, in the order of ranks. Nothing goes to oneself: a rank's own entries are 0.
        """
        arrived = tensor.new_empty(sum(receive))
        self._record("send", tensor)
        self._record("receive", arrived)
        if self.size == 1:
            return arrived
        # gloo sums tensors of a GPU, but sends only those of the CPU.
        is_staged = isinstance(self._process_group, dist.ProcessGroupGloo) and not tensor.is_cpu
        sent, received = (tensor.cpu(), arrived.cpu()) if is_staged else (tensor, arrived)
        # The one collective that both gloo and NCCL have for parts of unlike sizes.
        options = dist.AllToAllOptions()
        self._started(self._connections.alltoall_base(received, sent, list(receive), list(send), options)).wait()
        return arrived.copy_(received) if is_staged else arrived

    @property
    def _is_nccl(self) -> bool:
        """Whether the group is on NCCL, which builds of torch for the CPU don't know."""
        return dist.is_nccl_available() and isinstance(self._process_group, dist.ProcessGroupNCCL)

    @property
    def _connections(self) -> dist.ProcessGroup:
        if self._process_group is None:
            raise PeerLost(f"the group {self.purpose} of {list(self.devices)} is not connected any more")
        if self.pulse.is_interrupted:
            raise PeerLost(f"device {self.devices[self.rank]} was interrupted before an operation for {self.purpose}")
        return self._process_group

    def _started(self, work: dist.Work) -> Pending:
        self._under_way.append(work)
        return Pending(work, group=self)

    def await_work(self, work: dist.Work) -> None:
        """Return when `work` is done. Raises PeerLost if it failed, or if this rank is interrupted before that."""
        if self._is_nccl:
            work.wait()  # of the stream only; an interrupted communicator is aborted
            return
        while True:
            try:
                work.wait(timedelta(seconds=SLICE_S))
            except RuntimeError:  # of an operation that failed, or merely takes longer
                if work.is_completed():
                    self._conclude(work)
                    return
                if self.pulse.is_interrupted:
                    raise PeerLost(f"interrupted while waiting for {self.purpose} of {list(self.devices)}") from None
            else:
                return

    def forget(self, work: dist.Work) -> None:
        """It is done."""
        self._under_way = [each for each in self._under_way if each is not work]

    def _conclude(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"{self.purpose} of {list(self.devices)} failed: {error}") from error

    def _record(self, operation: Operation, tensor: torch.Tensor) -> None:
        if self.size > 1:
            self.traffic.record(
                self.purpose,
                operation,
                num_bytes=tensor.numel() * tensor.element_size(),
                group_size=self.size,
            )


@final
class Abandoned:
    """Connections that nobody uses any more. To end them while an operation hangs would hang too."""

    def __init__(self, process_group: dist.ProcessGroup, works: list[dist.Work]) -> None:
        self._process_group = process_group
        self._works = works

    @property
    def is_at_rest(self) -> bool:
        return all(work.is_completed() for work in self._works)
