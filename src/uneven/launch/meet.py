"""How the launchers of a job find each other: the first one listens, the others call until it answers.

A port may be taken, by another job too. So the first takes the next free one of a few, and the others call them all:
who answers must know the job. Loads no torch, except to ask torchrun's store for the port.
"""

import errno
import ipaddress
import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from uneven.errors import ConfigError, HostLost
from uneven.launch.peers import Kind, Peers

PORTS_TRIED = 8
ANSWER_S = 2
"""How long a caller may take to say who it is, and the first launcher to answer."""
RETRY_S = 0.2
HELLO_BYTES = 2**20
LINE_S = 2
"""How long a message that has begun may stand still, on its way in or out: a launcher may be stopped in the midst."""
PROBE_EVERY_S, PROBES = 5, 3
"""A host that does not even acknowledge these is gone."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where launcher `index` of `count` meets the others: the first is found at `host`, from `port` on.

    `job_id` tells this job from another one there. With `has_store`, torchrun serves a store at `port`, in which the
    port to call stands.
    """

    index: int = 0
    count: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    kind: Kind = "host"
    job_id: str = ""
    has_store: bool = False

    @property
    def ports(self) -> range:
        return range(self.port, min(self.port + PORTS_TRIED, 2**16))

    @property
    def place(self) -> str:
        last = "" if self.has_store else f" to {self.ports[-1]}"
        return f"{self.host}, port {self.port}{last}"


@dataclass(frozen=True, slots=True)
class Met:
    """The others, and the address at which they reach this launcher: its own end of the line."""

    peers: Peers
    address: str


def meet(meeting: Meeting, *, timeout_s: float) -> Met:
    """Find the others; called by all of them. HostLost if they have not met in time, ConfigError if they can't."""
    if meeting.count == 1:
        return Met(Peers(lines={}), meeting.host)
    return _receive(meeting, timeout_s) if meeting.index == 0 else _call(meeting, timeout_s)


# The first


def _receive(meeting: Meeting, timeout_s: float) -> Met:
    """Listen until all others have called."""
    deadline = time.monotonic() + timeout_s
    lines: dict[int, Connection] = {}
    names = {0: socket.gethostname()}
    addresses = []
    with _listen(meeting) as listener:
        if meeting.has_store:
            _agree_on_port(meeting, timeout_s, port=listener.getsockname()[1])
        try:
            while len(lines) < meeting.count - 1:
                listener.settimeout(max(1e-3, deadline - time.monotonic()))
                caller = listener.accept()[0]
                address, line = caller.getsockname()[0], _line(caller)
                hello = _welcome(line, meeting, lines=lines)
                if hello is not None:
                    lines[hello["index"]], names[hello["index"]] = line, hello["name"]
                    addresses.append(address)
        except TimeoutError:
            absent = ", ".join(str(index) for index in range(1, meeting.count) if index not in lines)
            late = f"{meeting.kind} {absent} did not call {meeting.place} within {timeout_s:g} s"
            _send(lines.values(), {"late": late})
            raise HostLost(late) from None
        except ConfigError as error:
            _send(lines.values(), {"error": str(error)})
            raise
    ordered = [names[index] for index in range(meeting.count)]
    _send(lines.values(), {"names": ordered})
    address = next((each for each in addresses if not is_loopback(each)), addresses[0])
    return Met(Peers(ordered, kind=meeting.kind, lines=lines), address)


def _listen(meeting: Meeting) -> socket.socket:
    """On the address given; on all of this host's where a name is given, which may stand for another one here."""
    own = meeting.host if meeting.host == "localhost" or _is_address(meeting.host) else ""
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    for port in (0,) if meeting.has_store else meeting.ports:
        try:
            return socket.create_server((own, port), family=family, backlog=meeting.count)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"{meeting.kind} 0 is to be called at {own}, which is no address of this host"
                ) from None
    raise ConfigError(f"no port is free: tried {meeting.place}")


def _welcome(line: Connection, meeting: Meeting, *, lines: Mapping[int, Connection]) -> dict[str, Any] | None:
    """What a caller says, if it is one of the job's that is not there; else its line is closed."""
    hello = _read(line)
    if hello is not None and (hello.get("job"), hello.get("kind")) == (meeting.job_id, meeting.kind):
        index, count = hello["index"], hello["count"]
        if count != meeting.count:
            name = f"{meeting.kind} {index} ({hello['name']})"
            reason = f"{meeting.kind} 0 is one of {meeting.count}, but {name} one of {count}"
            _send([line], {"error": reason})
            raise ConfigError(reason)
        # One that has called has nothing more to say yet: if its line can be read, it has left.
        if index not in lines or lines[index].poll():
            _send([line], {"joined": True})
            _limit(line, LINE_S)
            return hello
        _send([line], {"refused": f"another {meeting.kind} {index} is there already"})
    line.close()
    return None


# The others


def _call(meeting: Meeting, timeout_s: float) -> Met:
    """Call the first until it answers, then wait until it has heard of all."""
    deadline = time.monotonic() + timeout_s
    ports = [_agree_on_port(meeting, timeout_s)] if meeting.has_store else meeting.ports
    reason = refusal = ""
    while True:
        for port in ports:
            try:
                found = _try(meeting, port)
            except OSError as error:
                reason = str(error)
                continue
            if isinstance(found, Met):
                return found
            refusal = found
        if time.monotonic() > deadline:
            raise HostLost(
                f"{meeting.kind} 0 was not found at {meeting.place} within {timeout_s:g} s: {refusal or reason}"
            )
        time.sleep(RETRY_S)


def _try(meeting: Meeting, port: int) -> Met | str:
    """The others, if the job's first launcher is there; why not, otherwise. Raises OSError if nobody is."""
    caller = socket.create_connection((meeting.host, port), timeout=ANSWER_S)
    address, line = caller.getsockname()[0], _line(caller)
    hello = {"job": meeting.job_id, "kind": meeting.kind, "count": meeting.count, "index": meeting.index}
    _send([line], {**hello, "name": socket.gethostname()})
    answer = _read(line) or {}
    if "joined" in answer:
        _limit(line, 0)
        answer = _read(line) or {"late": f"{meeting.kind} 0 left before all had come"}
        _limit(line, LINE_S)
    if "names" in answer:
        return Met(Peers(answer["names"], index=meeting.index, kind=meeting.kind, lines={0: line}), address)
    line.close()
    if "error" in answer:
        raise ConfigError(answer["error"])
    if "late" in answer:
        raise HostLost(answer["late"])
    return str(answer.get("refused", f"port {port} is somebody else's"))


def _agree_on_port(meeting: Meeting, timeout_s: float, *, port: int | None = None) -> int:
    """The port to call, which the first launcher has put into torchrun's store; it passes `port`."""
    # Here and not at the top: it loads torch, which only a job of torchrun's needs so early.
    from uneven.comm import connect_store

    key = f"uneven/{meeting.job_id}/port"
    try:
        store = connect_store(meeting.host, meeting.port, timeout_s=timeout_s)
        if port is not None:
            store.set(key, str(port))
        return int(store.get(key))
    except RuntimeError as error:  # of torch, when it has waited in vain
        raise HostLost(f"torchrun's store at {meeting.place} does not say where rank 0 is: {error}") from None


# Lines and addresses


def _line(end: socket.socket) -> Connection:
    """Messages over a socket, which ends when the other end or its host is gone. At first a read waits briefly."""
    end.settimeout(None)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * PROBE_EVERY_S * (PROBES + 1))
    line = Connection(end.detach())
    _limit(line, ANSWER_S)
    return line


def _limit(line: Connection, seconds: int) -> None:
    """Give up a read after so long, 0 for never: strangers may say nothing, or half a message. A write has its own."""
    with socket.socket(fileno=os.dup(line.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", LINE_S, 0))


def is_loopback(address: str) -> bool:
    """Whether an address leads nowhere but to its own host."""
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _send(lines: Iterable[Connection], message: Mapping[str, Any]) -> None:
    """One that is gone is found out by the next read."""
    for line in lines:
        with suppress(OSError):
            line.send_bytes(json.dumps(message).encode())


def _read(line: Connection) -> dict[str, Any] | None:
    """A message, or None where nothing comes that is one."""
    try:
        message = json.loads(line.recv_bytes(HELLO_BYTES))
    except (OSError, EOFError, ValueError):
        return None
    return message if isinstance(message, dict) else None
