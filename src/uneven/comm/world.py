"""One rank's way to all others: its device, the store where ranks meet, and the groups it has joined.

Groups are built by their members alone, each on a prefix of the store of its own, so no rank waits for one that is
not concerned. `torch.distributed` is called in this package only.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, final

import torch
import torch.distributed as dist

from uneven.comm.group import Group
from uneven.comm.traffic import Traffic
from uneven.errors import LayoutError

Backend = Literal["gloo", "nccl"]
Store = dist.TCPStore


def serve_store(host: str, *, timeout_s: float) -> dist.TCPStore:
    """The meeting place, on a port that the system chooses (`.port`); lives as long as the returned value."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # The store takes the socket over; left to itself it would listen on all interfaces.
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """A client of the store that `serve_store` started."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


@dataclass(frozen=True, slots=True)
class Transport:
    """How a rank reaches its peers: the back-end, where its tensors live, the address at which peers find it.

    An operation that takes longer than `timeout_s` seconds raises.
    """

    backend: Backend = "gloo"
    torch_device: str = "cpu"
    host: str = "127.0.0.1"
    timeout_s: float = 600.0


@final
class World:
    """A rank's view of the job. Every device of `devices` constructs one on the same store.

    `device` is this rank's id among `devices`.
    """

    def __init__(self, device: int, devices: Sequence[int], *, store: dist.Store, transport: Transport) -> None:
        self.device = device
        self.devices = tuple(devices)
        self.torch_device = torch.device(transport.torch_device)
        if self.torch_device.type == "cuda":
            # What names no device, a library's scratch memory say, is to lie on this rank's and not on the first GPU.
            torch.cuda.set_device(self.torch_device)
        self.traffic = Traffic()
        self._store = store
        self._transport = transport
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}

    def group(self, devices: Sequence[int], *, purpose: str) -> Group:
        """The group of `devices` for one purpose, built on first use; called by its members only, else LayoutError.

        Purposes are counted apart and never share a communicator, so their operations may overlap freely.
        """
        members = tuple(devices)
        strangers = sorted(set(members) - set(self.devices))
        if strangers or self.device not in members:
            raise LayoutError(
                f"device {self.device} of the devices {list(self.devices)} can't join a group of {list(members)}: "
                + (f"{strangers} are not in this job" if strangers else "it is not one of them")
            )
        key = (purpose, members)
        if key not in self._groups:
            process_group = self._connect(members, purpose=purpose) if len(members) > 1 else None
            self._groups[key] = Group(
                members, device=self.device, purpose=purpose, traffic=self.traffic, process_group=process_group
            )
        return self._groups[key]

    def scoped(self, name: str, devices: Sequence[int]) -> "World":
        """A world of some of the devices on a prefix of its own, with new groups and counters; by its members only."""
        store = dist.PrefixStore(name, self._store)
        return World(self.device, devices, store=store, transport=self._transport)

    def everyone(self, *, purpose: str) -> Group:
        """The group of all devices."""
        return self.group(self.devices, purpose=purpose)

    def _connect(self, members: tuple[int, ...], *, purpose: str) -> dist.ProcessGroup:
        prefix = f"{purpose}/{'-'.join(map(str, members))}"
        store = dist.PrefixStore(prefix, self._store)
        rank = members.index(self.device)
        timeout = timedelta(seconds=self._transport.timeout_s)
        if self._transport.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, len(members), options)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._transport.host)]
        group = dist.ProcessGroupGloo(store, rank, len(members), options)
        # The constructor returns when this rank's connections stand; a member that left now would fail slower ones.
        group.allreduce([torch.zeros(1)]).wait()
        return group
