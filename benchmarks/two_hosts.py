"""Two hosts on one machine: network namespaces with a link of limited bandwidth between them. Needs root.

A rank enters its namespace after it has been started; what it connects from then on goes over the link, or stays in
its namespace.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    namespace: str
    address: str


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Two namespaces joined by a link of `rate` (as `tc` writes it) in each direction; gone at the end.

    Raises OSError or CalledProcessError where the system does not allow it.
    """
    hosts = tuple(Host(f"uneven-{os.getpid()}-{side}", f"10.0.0.{side + 1}") for side in (0, 1))
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        first, second = (host.namespace for host in hosts)
        _ip("link", "add", "link0", "netns", first, "type", "veth", "peer", "name", "link0", "netns", second)
        for host in hosts:
            inside = ("-n", host.namespace)
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", "link0")
            _ip(*inside, "link", "set", "link0", "up")
            _ip(*inside, "link", "set", "lo", "up")
            shape = ["tbf", "rate", rate, "burst", "1mb", "latency", "100ms"]
            _run("tc", *inside, "qdisc", "add", "dev", "link0", "root", *shape)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.namespace], check=False, capture_output=True)


def enter(host: Host) -> None:
    """Move the calling thread, and those that it starts from now on, into a host's namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host.namespace}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter the namespace {host.namespace}")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
