"""Communication between ranks: the world, its groups, and byte counters. Alone in calling `torch.distributed`."""

from uneven.comm.group import Group, Pending
from uneven.comm.pulse import Pulse
from uneven.comm.traffic import Traffic
from uneven.comm.world import Backend, Store, Transport, World, connect_store, serve_store

__all__ = [
    "Backend",
    "Group",
    "Pending",
    "Pulse",
    "Store",
    "Traffic",
    "Transport",
    "World",
    "connect_store",
    "serve_store",
]
