"""The rank of a process that torchrun or Slurm started: a thread, beside the launcher's work in the main thread.

So signals and the news of other ranks are heard while the rank is blocked in a collective, as by a launcher that has
its ranks in other processes. A blocked thread can't be ended; its process is.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing import connection as mp_connection
from types import TracebackType
from typing import Any, Self, final

from uneven.comm import Store
from uneven.errors import UnevenError
from uneven.launch import RANK_THREAD
from uneven.launch.failure import Failure
from uneven.launch.launcher import GRACE_S, LaunchSettings, name_rank, share_store
from uneven.launch.rank import Mailbox, Message, Program, RankSettings, run_program


@final
class InlineRank:
    """As `Launcher`, for the one device that this process is."""

    def __init__(
        self, program: Program, args: tuple[Any, ...] = (), *, devices: Sequence[int], settings: LaunchSettings
    ) -> None:
        self._program = program
        self._args = args
        self._devices = tuple(devices)
        self._settings = settings
        self._ours, self._theirs = Pipe()
        self._store: Store | None = None

    def __enter__(self) -> Self:
        settings = self._settings
        (device,) = settings.site.devices_here(self._devices)
        self._store, store = share_store(settings)
        rank_settings = RankSettings(
            device=device,
            devices=self._devices,
            store=store,
            transport=settings.transport_of(settings.site.local_rank),
            num_threads=settings.threads_for(settings.site.num_neighbours),
            log=None,
        )
        threading.Thread(
            target=run_program,
            args=(rank_settings, Mailbox(device, self._theirs)),
            kwargs={"program": self._program, "args": self._args},
            name=RANK_THREAD,
            daemon=True,
        ).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._store = None

    def tell(self, command: Any) -> None:
        """Send a command to the rank's mailbox."""
        self._ours.send(command)

    def messages(self) -> Iterator[Message]:
        """What the rank posts, and its `result`. Raises as `Launcher.messages` does."""
        peers = self._settings.site.peers
        while True:
            ready = mp_connection.wait([self._ours, *peers.lines])
            if self._ours in ready:
                message: Message = self._ours.recv()
                if message.kind == "error":
                    raise self._fail([message.payload])
                if message.kind != "beat":
                    yield message
                if message.kind == "result":
                    return
            if peers.hear(ready):
                raise self._fail([])

    def _fail(self, failures: list[Failure]) -> UnevenError:
        """The error to raise; the rank may be about to say what it saw."""
        deadline = time.monotonic() + GRACE_S  # signs of life come too, and for ever
        while not failures and self._ours.poll(max(0.0, deadline - time.monotonic())):
            message = self._ours.recv()
            failures = [message.payload] if message.kind == "error" else []
        (device,) = self._settings.site.devices_here(self._devices)
        peers = self._settings.site.peers
        return peers.settle([name_rank(f, device, devices=self._devices, where=peers.where) for f in failures])
