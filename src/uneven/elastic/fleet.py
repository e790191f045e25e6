"""All ranks of an elastic job as if they were one launcher's: the first one's own, and those of the others' agents.

With one host there are no others. A host is lost when its line ends, when nothing is heard of it for too long, or when
it does not end a rank that it was told to end; then all of its ranks are, at once.
"""

import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from types import TracebackType
from typing import Any, Self, final

from uneven.elastic.ranks import ranks_of
from uneven.elastic.watch import BUSY_S
from uneven.elastic.wire import Wire
from uneven.errors import UnevenError
from uneven.launch.failure import Failure
from uneven.launch.launcher import LaunchSettings
from uneven.launch.rank import Message, Program
from uneven.layout import ParallelPlan

PING_S = 1.0
"""How often the others hear of the first launcher at least."""
QUIET_S = 1.0
"""Of a host that has been silent for so long nothing else is concluded: what is the matter will soon be clear."""
END_S = 10.0
"""How long the others may take to end when the job is over."""


@dataclass(slots=True)
class _Host:
    """Another host: those of its devices whose programs run, since when each was to be killed, and their processes."""

    running: set[int]
    heard_s: float
    has_spoken: bool = False
    killed_s: dict[int, float] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loss:
    """A host is lost with these devices; `silent_s` is how long it had been silent."""

    host: str
    devices: tuple[int, ...]
    silent_s: float
    why: str


@final
class Fleet:
    """`program(world, mailbox, *args)` on every device of the plan `home`; leaving it as a context ends all processes.

    `reports` are the types of what the program posts, which matters where there are several hosts.
    """

    def __init__(
        self,
        program: Program,
        args: tuple[Any, ...] = (),
        *,
        home: ParallelPlan,
        settings: LaunchSettings,
        reports: Sequence[type] = (),
    ) -> None:
        self._launcher = ranks_of(program, args, home=home, settings=settings)
        self._peers = settings.site.peers
        self._host_of = settings.site.place(home.devices)
        self._hosts: dict[int, _Host] = {}
        self._wire = Wire(home.structure, reports=reports)
        self._limit_s = BUSY_S
        self._is_over = threading.Event()
        self._pinger = threading.Thread(target=self._ping, name="pings", daemon=True)
        self._asked: list[Any] = []

    def __enter__(self) -> Self:
        self._launcher.__enter__()
        self._peers.outlive_hosts()
        for index in self._peers.others:
            running = {device for device, host in self._host_of.items() if host == index}
            self._hosts[index] = _Host(running, time.monotonic())
        self._pinger.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._is_over.set()
        self._pinger.join()
        if error is None:
            self._end_others()
        self._launcher.__exit__(kind, error, tb)

    def _end_others(self) -> None:
        """Let the others end, and wait until they have."""
        for index in self._peers.others:
            self._peers.say(index, {"end": True})
        deadline = time.monotonic() + END_S
        while self._peers.others and (rest_s := deadline - time.monotonic()) > 0:
            self._peers.hear(mp_connection.wait(self._peers.lines, rest_s))

    def _ping(self) -> None:
        """In a thread of its own, since the main one may be busy for a while, with drawing say."""
        while not self._is_over.wait(PING_S):
            for index in self._peers.others:
                self._peers.say(index, {"limit_s": self._limit_s})

    # What a launcher does

    @property
    def running(self) -> list[int]:
        """The devices whose programs have neither returned nor raised, and whose processes are not known to be dead."""
        return [*self._launcher.running, *(device for host in self._hosts.values() for device in sorted(host.running))]

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the devices, as far as they are known, each of its own host."""
        pids = self._launcher.pids
        for host in self._hosts.values():
            pids |= host.pids
        return pids

    def host_name(self, device: int) -> str:
        return self._peers.names[self._host_of[device]] or socket.gethostname()

    def is_reachable(self, device: int) -> bool:
        """Whether the host of a device takes part."""
        index = self._host_of[device]
        return index == self._peers.index or index in self._hosts

    def tell(self, command: Any, *, devices: Collection[int] | None = None) -> None:
        """Send a command to these devices' mailboxes, or to all of them. A rank that is gone is passed over."""
        for device in self._launcher.running:
            if devices is None or device in devices:
                self._launcher.tell(command, device=device)
        for index, host in self._hosts.items():
            there = sorted(host.running if devices is None else host.running & set(devices))
            if there:
                self._peers.say(index, {"tell": self._wire.encode(command), "devices": there})

    def start(self, device: int) -> None:
        """Start the process of a device whose host is reachable."""
        host = self._hosts.get(self._host_of[device])
        if host is None:
            self._launcher.start(device)
        else:
            host.running.add(device)
            self._peers.say(self._host_of[device], {"start": device})

    def kill(self, device: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process of a device, if it has one that runs."""
        host = self._hosts.get(self._host_of[device])
        if host is None:
            self._launcher.kill(device, number)
        else:
            if number == signal.SIGKILL:
                host.killed_s[device] = time.monotonic()
            self._peers.say(self._host_of[device], {"kill": device, "signal": int(number)})

    def poll(self, timeout_s: float) -> list[Message]:
        """What has come from the ranks, after waiting `timeout_s` at most. Raises what has ended another launcher."""
        messages = self._launcher.poll(timeout_s)
        if self._peers.hear(mp_connection.wait(self._peers.lines, 0)):
            raise self._launcher.fail({})
        for index, said in self._peers.said():
            if index in self._hosts:
                messages += self._take(self._hosts[index], said)
        return messages

    def _take(self, host: _Host, said: dict[str, Any]) -> Iterator[Message]:
        host.heard_s, host.has_spoken = time.monotonic(), True
        host.pids = {int(device): pid for device, pid in said.get("pids", {}).items()}
        self._asked += [self._wire.decode(each) for each in said.get("asked", ())]
        for device, kind, payload in said.get("messages", ()):
            if kind in ("result", "end"):
                host.running.discard(device)
                host.killed_s.pop(device, None)
            yield Message(device, kind, self._wire.decode(payload))

    def fail(self, failures: dict[int, Failure]) -> UnevenError:
        """End all ranks; the error to raise. `failures` are those of devices of this host."""
        return self._launcher.fail(failures)

    # What concerns hosts

    def asked(self) -> list[Any]:
        """Commands that other launchers want all ranks to have."""
        asked, self._asked = self._asked, []
        return asked

    def is_quiet(self, device: int) -> bool:
        """Whether the host of a device has not been heard of for a while."""
        host = self._hosts.get(self._host_of[device])
        return host is not None and host.has_spoken and time.monotonic() - host.heard_s > QUIET_S

    def lost(self, limit_s: float) -> Iterator[Loss]:
        """Hosts that have been lost since the last time; none may be silent for longer than `limit_s`.

        One that comes back learns that the job went on without it.
        """
        self._limit_s = limit_s
        now = time.monotonic()
        for index, host in list(self._hosts.items()):
            silent_s = now - host.heard_s
            unkilled = [device for device, since_s in host.killed_s.items() if now - since_s > limit_s]
            if index in self._peers.gone:
                why = self._peers.gone[index]
            elif silent_s > (limit_s if host.has_spoken else max(BUSY_S, limit_s)):
                why = f"{self._peers.name(index)} said nothing for {silent_s:.1f} s"
            elif unkilled:
                why = f"{self._peers.name(index)} did not end devices {unkilled} within {limit_s:.1f} s"
            else:
                continue
            if index not in self._peers.gone:
                self._peers.fence(index, why)
            del self._hosts[index]
            yield Loss(self._peers.name(index), tuple(sorted(host.running)), silent_s, why)
