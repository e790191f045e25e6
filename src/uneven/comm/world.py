"""One rank's way to all others: its device, the store where ranks meet, and the groups it has joined.

Groups are built by their members alone, each on a prefix of the store of its own, so no rank waits for one that is
not concerned. A world may go on with other devices: then a new generation of connections takes the place of the old.
`torch.distributed` is called in this package only.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, final

import torch
import torch.distributed as dist

from uneven.comm.group import SLICE_S, Abandoned, Group
from uneven.comm.pulse import Pulse
from uneven.comm.traffic import Traffic
from uneven.errors import LayoutError, PeerLost

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
    """A rank's view of the job. Every device of `devices` constructs one on the same store, or what `store` returns.

    `device` is this rank's id among `devices`. Who `enter`s other generations passes a function, since a client of
    the store may be blocked for as long as something hangs on it.
    """

    def __init__(
        self,
        device: int,
        devices: Sequence[int],
        *,
        store: dist.Store | Callable[[], dist.Store],
        transport: Transport,
        pulse: Pulse | None = None,
    ) -> None:
        self.device = device
        self.devices = tuple(devices)
        self.torch_device = torch.device(transport.torch_device)
        if self.torch_device.type == "cuda":
            # What names no device, a library's scratch memory say, is to lie on this rank's and not on the first GPU.
            torch.cuda.set_device(self.torch_device)
        self.traffic = Traffic()
        self.pulse = pulse or Pulse()
        self._meet = store if callable(store) else lambda: store
        self._store = self._meet()
        self._abandoned: list[Abandoned] = []
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
            self._groups[key] = Group(
                members,
                device=self.device,
                purpose=purpose,
                traffic=self.traffic,
                pulse=self.pulse,
                torch_device=self.torch_device,
            )
        group = self._groups[key]
        if not group.is_connected:
            group.connect(self._connect(members, purpose=purpose))
        return group

    def enter(self, generation: int, devices: Sequence[int]) -> None:
        """Go on with these devices on connections of their own, whatever became of the others.

        Called by each of `devices`, in any order. Groups whose members all go on keep their identity, and are connected
        again by `group`; all others are gone.
        """
        for group in self._groups.values():
            self._abandon(group)
        self.devices = tuple(devices)
        self._groups = {key: group for key, group in self._groups.items() if set(group.devices) <= set(devices)}
        self._store = dist.PrefixStore(f"generation-{generation}", self._meet())

    def narrow(self, devices: Sequence[int]) -> None:
        """Go on with some of the devices, on the connections that there are between them."""
        self.devices = tuple(devices)
        for key, group in list(self._groups.items()):
            if not set(group.devices) <= set(devices):
                self._abandon(self._groups.pop(key))

    def _abandon(self, group: Group) -> None:
        abandoned = group.disconnect()
        if abandoned is not None:
            self._abandoned.append(abandoned)
        self._abandoned = [each for each in self._abandoned if not each.is_at_rest]

    def interrupt(self) -> None:
        """Make this rank's main thread give up what it waits for. Called by another thread."""
        self.pulse.interrupt()
        for group in list(self._groups.values()):
            group.abort()

    def scoped(self, name: str, devices: Sequence[int]) -> "World":
        """A world of some of the devices on a prefix of its own, with new groups and counters; by its members only."""
        store = dist.PrefixStore(name, self._store)
        return World(self.device, devices, store=store, transport=self._transport, pulse=self.pulse)

    def everyone(self, *, purpose: str) -> Group:
        """The group of all devices."""
        return self.group(self.devices, purpose=purpose)

    def _connect(self, members: tuple[int, ...], *, purpose: str) -> dist.ProcessGroup:
        prefix = f"{purpose}/{'-'.join(map(str, members))}"
        store = dist.PrefixStore(prefix, self._store)
        rank = members.index(self.device)
        timeout = timedelta(seconds=self._transport.timeout_s)
        found: list[dist.ProcessGroup | RuntimeError] = []
        # A constructor waits for all members, of whom one may die before it has come; a thread can be left behind,
        # which ends after the timeout.
        thread = threading.Thread(
            target=lambda: found.append(self._construct(store, rank, size=len(members), timeout=timeout)),
            name=f"connect {prefix}",
            daemon=True,
        )
        with self.pulse.wait(purpose):
            thread.start()
            while thread.is_alive():
                thread.join(SLICE_S)
                if thread.is_alive() and self.pulse.is_interrupted:
                    raise PeerLost(f"interrupted while {list(members)} connected for {purpose}")
        if isinstance(found[0], RuntimeError):
            raise PeerLost(f"{list(members)} could not connect for {purpose}: {found[0]}") from found[0]
        return found[0]

    def _construct(
        self, store: dist.Store, rank: int, *, size: int, timeout: timedelta
    ) -> dist.ProcessGroup | RuntimeError:
        """Connections between `size` ranks, or why there are none."""
        try:
            return self._construct_or_raise(store, rank, size=size, timeout=timeout)
        except RuntimeError as error:
            return error.with_traceback(None)  # whose frames would keep half-made connections

    def _construct_or_raise(self, store: dist.Store, rank: int, *, size: int, timeout: timedelta) -> dist.ProcessGroup:
        if self._transport.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._transport.host)]
        group = dist.ProcessGroupGloo(store, rank, size, options)
        # The constructor returns when this rank's connections stand; a member that left now would fail slower ones.
        group.allreduce([torch.zeros(1)]).wait()
        return group
