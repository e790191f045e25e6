"""A process's place in a job on several hosts: who else is there, which devices are here, how peers reach it.

What depends on all hosts is a pure function of what they said of themselves when they met. Loads no torch.
"""

import fcntl
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby

from uneven.errors import ConfigError
from uneven.launch.agreement import agree, code_fingerprint
from uneven.launch.environment import StaticJob
from uneven.launch.meet import Meeting, is_loopback, meet
from uneven.launch.peers import Peers

SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Place:
    """What a process knows of its place before it has met the others.

    `num_devices` of this host, None for its part of the rest; `local_address` at which peers are to reach it, None for
    that of the way to the first host. With `is_rank` the process is itself a rank, the `local_rank`th of its host.
    """

    meeting: Meeting = field(default_factory=Meeting)
    num_devices: int | None = None
    local_address: str | None = None
    is_rank: bool = False
    local_rank: int = 0

    @classmethod
    def of(cls, job: StaticJob | None) -> "Place":
        """That of a process that torchrun or Slurm started, or of one that is alone."""
        if job is None:
            return cls()
        meeting = Meeting(job.rank, job.world_size, job.host, job.port, "rank", job.job_id, job.has_store)
        return cls(meeting, num_devices=1, is_rank=True, local_rank=job.local_rank)


@dataclass(frozen=True, slots=True)
class Host:
    """What a launcher said of itself: its host's name, its address there, how many devices it wants."""

    name: str = ""
    address: str = "127.0.0.1"
    num_devices: int | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """This launcher among those of the job, by index."""

    peers: Peers = field(default_factory=lambda: Peers(lines={}))
    hosts: tuple[Host, ...] = (Host(),)
    is_rank: bool = False
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether the run's folder and the progress are this launcher's."""
        return self.peers.index == 0

    @property
    def address(self) -> str:
        return self.hosts[self.peers.index].address

    @property
    def num_neighbours(self) -> int:
        """How many launchers are on this host, this one included: its ranks, where each is one."""
        return [host.name for host in self.hosts].count(self.hosts[self.peers.index].name) if self.is_rank else 1

    def devices_here(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Those of the job's devices whose ranks this launcher starts: they are dealt to the hosts in order."""
        return tuple(device for device, host in self.place(devices).items() if host == self.peers.index)

    def place(self, devices: Sequence[int]) -> dict[int, int]:
        """The index of the launcher that starts the rank of each of the job's devices."""
        hosts = [index for index, count in enumerate(self.deal(len(devices))) for _ in range(count)]
        return dict(zip(devices, hosts, strict=True))

    def deal(self, num_devices: int) -> tuple[int, ...]:
        """How many devices each host has. Raises ConfigError if that is not what they want."""
        wanted = [host.num_devices for host in self.hosts]
        rest = num_devices - sum(count or 0 for count in wanted)
        num_open = wanted.count(None)
        if rest < num_open or (rest > 0 and num_open == 0):
            needs = f"the plan has {num_devices} devices, but {self._tell(wanted)}"
            raise ConfigError(f"{needs}; --replicas or --shares says how many the plan has")
        counts = []
        for count in wanted:
            if count is None:
                count = -(-rest // num_open)
                rest, num_open = rest - count, num_open - 1
            counts.append(count)
        return tuple(counts)

    def _tell(self, wanted: Sequence[int | None]) -> str:
        if self.is_rank:
            return f"{len(wanted)} processes were started, one for each device"
        names = [self.peers.name(index) if self.peers.count > 1 else "this host" for index in range(len(wanted))]
        each = [f"{name} {'none given' if count is None else count}" for name, count in zip(names, wanted, strict=True)]
        return f"--nproc-per-node is: {', '.join(each)}"

    def default_degrees(self) -> tuple[int, ...] | None:
        """Where the division is not given: a replica for each host. None where nothing is said of hosts either."""
        if self.peers.count == 1 and self.hosts[0].num_devices is None:
            return None
        if not self.is_rank:
            return tuple(host.num_devices or 1 for host in self.hosts)
        runs = [(name, len(list(run))) for name, run in groupby(host.name for host in self.hosts)]
        is_in_order = len({name for name, _ in runs}) == len(runs)
        return tuple(count for _, count in runs) if is_in_order else (len(self.hosts),)


@contextmanager
def join(place: Place, *, timeout_s: float) -> Iterator[Site]:
    """Meet the others of the job; an error that leaves the context ends the job for all of them.

    Called by all. Raises ConfigError if their code differs, HostLost if they do not meet in time.
    """
    met = meet(place.meeting, timeout_s=timeout_s)
    with met.peers as peers:
        agree(peers, code_fingerprint())
        address = met.address if place.local_address is None else address_of(place.local_address)
        said = peers.exchange({"address": address, "num_devices": place.num_devices})
        hosts = [Host(name, each["address"], each["num_devices"]) for name, each in zip(peers.names, said, strict=True)]
        yield Site(peers, tuple(reachable(hosts)), place.is_rank, place.local_rank)


def reachable(hosts: Sequence[Host]) -> list[Host]:
    """With addresses that all can use: who called over the loopback is on the first one's host."""
    return [replace(host, address=hosts[0].address) if is_loopback(host.address) else host for host in hosts]


def address_of(text: str) -> str:
    """An address, or that of a network interface of this host, by its name."""
    if text not in (name for _, name in socket.if_nameindex()):
        return text
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", text.encode()))
        except OSError as error:
            raise ConfigError(f"--local-addr {text}: this interface has no IPv4 address: {error.strerror}") from None
    return socket.inet_ntoa(found[20:24])
