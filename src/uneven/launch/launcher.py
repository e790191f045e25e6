"""Start one process for each device from a process that has torch loaded, and own them until they end.

The launcher serves the store where ranks meet, hears what they post, and when one raises or dies brings the job
down at once and says which, with that rank's own traceback.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import connection as mp_connection
from multiprocessing import context as mp_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from uneven.comm import Store, Transport, serve_store
from uneven.errors import RankFailed
from uneven.launch.rank import Failure, Message, Program, RankSettings, is_users_mistake, run_rank
from uneven.launch.zygote import interrupts_blocked, warm_up, zygote

GRACE_S = 0.3
"""After a first failure, how long to listen for the one that caused it: peers raise within 0.1 s of a death."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How ranks run. `logs` is a folder for a file per rank, None the terminal.

    On CUDA (`transport.torch_device` of "cuda") the i-th rank of this host has the i-th GPU.
    """

    transport: Transport = field(default_factory=Transport)
    num_threads: int | None = None
    logs: Path | None = None

    def threads_for(self, num_ranks: int) -> int:
        """CPU threads for each rank: the given number, or an equal part of this machine's cores."""
        return self.num_threads or max(1, len(os.sched_getaffinity(0)) // num_ranks)


@dataclass(slots=True)
class _Rank:
    device: int
    process: mp_context.ForkServerProcess
    connection: Connection
    lifeline: Connection
    is_done: bool = False


@final
class Launcher:
    """The processes of one job, `program(world, mailbox, *args)` in each; leaving it as a context ends them all."""

    def __init__(
        self, program: Program, args: tuple[Any, ...] = (), *, devices: Sequence[int], settings: LaunchSettings
    ) -> None:
        self._program = program
        self._args = args
        self._devices = tuple(devices)
        self._settings = settings
        self._ranks: list[_Rank] = []
        self._store: Store | None = None

    def __enter__(self) -> Self:
        warm_up()
        transport = self._settings.transport
        self._store = serve_store(transport.host, timeout_s=transport.timeout_s)
        try:
            with interrupts_blocked():
                for index, device in enumerate(self._devices):
                    self._ranks.append(self._start(index, device, port=self._store.port))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _start(self, index: int, device: int, *, port: int) -> _Rank:
        settings = self._settings
        transport = settings.transport
        if transport.torch_device == "cuda":
            transport = replace(transport, torch_device=f"cuda:{index}")
        rank_settings = RankSettings(
            device=device,
            devices=self._devices,
            port=port,
            transport=transport,
            num_threads=settings.threads_for(len(self._devices)),
            log=None if settings.logs is None else settings.logs / f"rank-{device}.log",
        )
        context = zygote()
        ours, theirs = context.Pipe()
        lifeline_theirs, lifeline = context.Pipe(duplex=False)
        process = context.Process(
            target=run_rank,
            args=(rank_settings,),
            kwargs={
                "connection": theirs,
                "lifeline": lifeline_theirs,
                "program": self._program,
                "args": self._args,
            },
            name=f"uneven-rank-{device}",
        )
        process.start()
        theirs.close()
        lifeline_theirs.close()
        return _Rank(device, process, ours, lifeline)

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each device that has been started."""
        return {rank.device: rank.process.pid or 0 for rank in self._ranks}

    def tell(self, command: Any, *, device: int | None = None) -> None:
        """Send a command to one device's mailbox, or to all of them. A rank that is gone is passed over."""
        for rank in self._ranks:
            if device in (None, rank.device):
                with suppress(BrokenPipeError, ConnectionResetError):
                    rank.connection.send(command)

    def messages(self, *, timeout_s: float | None = None) -> Iterator[Message]:
        """What the ranks post, and each one's `result`, until all have ended.

        Raises RankFailed with the traceback of the rank that failed first, after ending all others; the rank's own
        error instead where it ended over the user's input; TimeoutError if nothing comes for `timeout_s`.
        """
        while waiting := [rank for rank in self._ranks if not rank.is_done]:
            ready = mp_connection.wait([x for r in waiting for x in (r.connection, r.process.sentinel)], timeout_s)
            if not ready:
                raise TimeoutError(f"no rank of {[rank.device for rank in waiting]} has reported for {timeout_s} s")
            for rank in waiting:
                if rank.connection in ready or rank.process.sentinel in ready:
                    message = self._receive(rank)
                    if message.kind == "error":
                        self._fail(rank, message.payload)
                    rank.is_done = message.kind == "result"
                    yield message

    def _receive(self, rank: _Rank) -> Message:
        """The next message of a rank that has one or is dead; a death without a word is an error message too."""
        try:
            # A rank's end closes its line too; a line that stays open means that the zygote, which tells ends, is gone.
            if not rank.connection.poll(GRACE_S):
                text = "the zygote, from which ranks are forked, has ended, so that their ends can't be seen any more"
                return Message(rank.device, "error", Failure(0.0, text))
            message: Message = rank.connection.recv()
            return message
        except (EOFError, ConnectionResetError):
            rank.process.join()
            code = rank.process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            text = f"the process ended by {how} without a traceback{self._last_words(rank.device)}"
            return Message(rank.device, "error", Failure(0.0, text))

    def _fail(self, reporter: _Rank, failure: Failure) -> None:
        failures = [(failure, reporter)]
        deadline = time.monotonic() + GRACE_S
        while others := [r for r in self._ranks if not r.is_done and all(r is not seen for _, seen in failures)]:
            ready = mp_connection.wait([r.connection for r in others], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for other in others:
                if other.connection in ready:
                    message = self._receive(other)
                    other.is_done = message.kind == "result"
                    if message.kind == "error":
                        failures.append((message.payload, other))
        # A process that ended without a word has time 0: its peers' errors are consequences.
        first, culprit = min(failures, key=lambda entry: entry[0].time_s)
        self.stop()
        if is_users_mistake(first) and first.error is not None:
            raise first.error
        rank = self._devices.index(culprit.device)
        device = "" if rank == culprit.device else f" (device {culprit.device})"
        text = first.text.rstrip()
        raise RankFailed(f"rank {rank} of {len(self._devices)}{device} failed:\n{text}") from first.error

    def _last_words(self, device: int) -> str:
        if self._settings.logs is None:
            return ""
        log = self._settings.logs / f"rank-{device}.log"
        lines = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
        return f"; the end of its log {log}:\n" + "\n".join(lines) if lines else f"; its log {log} is empty"

    def stop(self) -> None:
        """End every rank that still runs, wait for its end, and close the store's port."""
        for rank in self._ranks:
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
            rank.lifeline.close()
        self._ranks = []
        self._store = None
