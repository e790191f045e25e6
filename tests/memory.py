"""Counts the bytes of live tensors, by their storages: what is allocated, not what the system lends."""

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """While it is entered: `live` bytes of storages that operations have made or used, and their `peak`.

    Pages of a file that is mapped into memory are the file's, and not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Count the peak from here on; entered for each stage."""
        with self:
            self.peak = self.live
            yield

    def settle(self, expected: int, *, timeout_s: float = 20.0) -> int:
        """`live`, once it is `expected` or the time is over: a thread of gloo lets go of a message a moment late."""
        deadline = time.monotonic() + timeout_s
        while self.live != expected and time.monotonic() < deadline:
            os.sched_yield()
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                # Only memory that torch has not allocated itself is given to a tensor in this way.
                may_be_file = func is torch.ops.aten.set_.source_Storage
                self._see(value.untyped_storage(), may_be_file=may_be_file)
        return result

    def _see(self, storage: torch.UntypedStorage, *, may_be_file: bool) -> None:
        if id(storage) in self._known:
            return
        num_bytes = 0 if may_be_file and is_of_a_file(storage.data_ptr()) else storage.nbytes()
        self._known.add(id(storage))
        weakref.finalize(storage, self._forget, id(storage), num_bytes)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def _forget(self, identity: int, num_bytes: int) -> None:
        self._known.discard(identity)
        self.live -= num_bytes


def is_of_a_file(address: int) -> bool:
    """Whether an address of this process lies in a mapped file of weights."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(".safetensors"):
                start, stop = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
                if start <= address < stop:
                    return True
    return False
