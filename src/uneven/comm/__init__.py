"""Communication between ranks: the world, its groups, and byte counters. Alone in calling `torch.distributed`."""

from uneven.comm.group import Group, Pending
from uneven.comm.traffic import Traffic
from uneven.comm.world import Backend, Transport, World, connect_store, serve_store

__all__ = ["Backend", "Group", "Pending", "Traffic", "Transport", "World", "connect_store", "serve_store"]
