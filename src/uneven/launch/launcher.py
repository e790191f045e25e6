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

import torch

from uneven.comm import Store, Transport, serve_store
from uneven.errors import UnevenError
from uneven.launch.failure import Failure
from uneven.launch.rank import Message, Program, RankSettings, run_rank
from uneven.launch.site import Site
from uneven.launch.zygote import interrupts_blocked, warm_up, zygote

GRACE_S = 0.3
"""After a first failure, how long to listen for the one that caused it: peers raise within 0.1 s of a death."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How ranks run. `logs` is a folder for a file per rank, None the terminal; `site` where else ranks run."""

    transport: Transport = field(default_factory=Transport)
    num_threads: int | None = None
    logs: Path | None = None
    site: Site = field(default_factory=Site)

    def threads_for(self, num_ranks: int) -> int:
        """CPU threads for each rank: the given number, or an equal part of this machine's cores."""
        return self.num_threads or max(1, len(os.sched_getaffinity(0)) // num_ranks)

    def transport_of(self, index: int) -> Transport:
        """That of the `index`th rank of this host: it has the GPU of this number; where there are fewer, they share."""
        device = self.transport.torch_device
        if device == "cuda":
            device = f"cuda:{index % max(1, torch.cuda.device_count())}"
        return replace(self.transport, torch_device=device, host=self.site.address)


def share_store(settings: LaunchSettings) -> tuple[Store | None, tuple[str, int]]:
    """The store of a job where the first launcher serves it, and its host and port; called by all launchers."""
    site = settings.site
    host = site.hosts[0].address
    store = serve_store(host, timeout_s=settings.transport.timeout_s) if site.is_first else None
    port = site.peers.exchange(store.port if store else None)[0]
    return store, (host, port)


def name_rank(failure: Failure, device: int, *, devices: Sequence[int], where: str) -> Failure:
    """A failure whose text says whose it is."""
    rank = devices.index(device)
    named = "" if rank == device else f" (device {device})"
    return replace(failure, text=f"rank {rank} of {len(devices)}{named}{where} failed:\n{failure.text}")


@dataclass(slots=True)
class _Rank:
    device: int
    process: mp_context.ForkServerProcess
    connection: Connection
    lifeline: Connection
    is_done: bool = False

    def close(self) -> None:
        """Wait for the end of the process, which has been told to end, and close its lines."""
        self.process.join()
        self.connection.close()
        self.lifeline.close()


def _exists(pid: int | None) -> bool:
    """Whether there is a process of this id."""
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    return True


@final
class Launcher:
    """A job's processes on this host, `program(world, mailbox, *args)` in each; leaving it as a context ends them.

    `devices` are those of the whole job; the settings' site says which of them are here.
    """

    def __init__(
        self, program: Program, args: tuple[Any, ...] = (), *, devices: Sequence[int], settings: LaunchSettings
    ) -> None:
        self._program = program
        self._args = args
        self._devices = tuple(devices)
        self._settings = settings
        self._ranks: list[_Rank] = []
        self._store: Store | None = None
        self._address = ("", 0)

    def __enter__(self) -> Self:
        warm_up()
        settings = self._settings
        self._store, self._address = share_store(settings)
        if settings.logs is not None:
            # Only now: where hosts share a disk, the first one has made the folder, and checked that it is new.
            settings.logs.mkdir(parents=True, exist_ok=True)
        try:
            for device in settings.site.devices_here(self._devices):
                self.start(device)
        except BaseException:
            self.stop()
            raise
        return self

    def start(self, device: int) -> None:
        """Start the process of a device that is of this host; one that it had before has ended."""
        settings = self._settings
        here = settings.site.devices_here(self._devices)
        for rank in [rank for rank in self._ranks if rank.device == device]:
            rank.close()
            self._ranks.remove(rank)
        rank_settings = RankSettings(
            device=device,
            devices=self._devices,
            store=self._address,
            transport=settings.transport_of(here.index(device)),
            num_threads=settings.threads_for(len(here)),
            log=None if settings.logs is None else settings.logs / f"rank-{device}.log",
        )
        with interrupts_blocked():
            self._ranks.append(self._start(rank_settings))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            # Before ranks end, whose peers would fail and seem to be the cause.
            self._settings.site.peers.give_up(error)
        self.stop()

    def _start(self, settings: RankSettings) -> _Rank:
        context = zygote()
        ours, theirs = context.Pipe()
        lifeline_theirs, lifeline = context.Pipe(duplex=False)
        process = context.Process(
            target=run_rank,
            args=(settings,),
            kwargs={
                "connection": theirs,
                "lifeline": lifeline_theirs,
                "program": self._program,
                "args": self._args,
            },
            name=f"uneven-rank-{settings.device}",
        )
        process.start()
        theirs.close()
        lifeline_theirs.close()
        return _Rank(settings.device, process, ours, lifeline)

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

        Raises RankFailed with the traceback of the rank that failed first, of any host, after ending all others; the
        rank's own error instead where it ended over the user's input; TimeoutError if nothing comes for `timeout_s`.
        """
        peers = self._settings.site.peers
        while devices := self.running:
            ready, messages = self._poll(timeout_s)
            if not ready:
                raise TimeoutError(f"no rank of {devices} has reported for {timeout_s} s")
            for message in messages:
                if message.kind in ("error", "end"):
                    raise self.fail({message.device: message.payload})
                if message.kind != "beat":
                    yield message
            if peers.hear(ready):
                raise self.fail({})

    @property
    def running(self) -> list[int]:
        """The devices whose programs have neither returned nor raised, and whose processes are not known to be dead."""
        return [rank.device for rank in self._ranks if not rank.is_done]

    def poll(self, timeout_s: float | None = None) -> list[Message]:
        """What has come from the ranks, at most one message of each, after waiting for the first for `timeout_s`.

        For those who decide themselves what a failure means: an `error` or `end` is a message like any other.
        """
        return self._poll(timeout_s)[1]

    def _poll(self, timeout_s: float | None) -> tuple[list[Any], list[Message]]:
        waiting = [rank for rank in self._ranks if not rank.is_done]
        lines = [x for r in waiting for x in (r.connection, r.process.sentinel)] + self._settings.site.peers.lines
        ready = mp_connection.wait(lines, timeout_s)
        messages = []
        for rank in waiting:
            if rank.process.sentinel in ready and _exists(rank.process.pid):
                # The zygote tells that a process has ended once it has seen to it; this one is there.
                text = "the zygote, from which ranks are forked, has ended, so that their ends can't be seen any more"
                raise self.fail({rank.device: Failure(0.0, text)})
            if rank.connection in ready or rank.process.sentinel in ready:
                message = self._receive(rank)
                rank.is_done = message.kind in ("result", "error", "end")
                messages.append(message)
        return ready, messages

    def kill(self, device: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process of a device, if it has one that runs."""
        for rank in self._ranks:
            if rank.device == device and not rank.is_done and rank.process.is_alive():
                os.kill(rank.process.pid or 0, number)

    def _receive(self, rank: _Rank) -> Message:
        """The next message of a rank that has one or is dead; of a death without a word that is of the kind `end`."""
        try:
            message: Message = rank.connection.recv()
            return message
        except (EOFError, ConnectionResetError):
            rank.process.join()
            code = rank.process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            text = f"the process ended by {how} without a traceback{self._last_words(rank.device)}"
            return Message(rank.device, "end", Failure(0.0, text))

    def fail(self, failures: dict[int, Failure]) -> UnevenError:
        """End all ranks; the error to raise. `failures`, by device, are those seen so far."""
        deadline = time.monotonic() + GRACE_S
        while others := [r for r in self._ranks if not r.is_done and r.device not in failures]:
            ready = mp_connection.wait([r.connection for r in others], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for other in others:
                if other.connection in ready:
                    message = self._receive(other)
                    other.is_done = message.kind == "result"
                    if message.kind in ("error", "end"):
                        failures[other.device] = message.payload
        self.stop()
        peers = self._settings.site.peers
        return peers.settle(
            [name_rank(f, device, devices=self._devices, where=peers.where) for device, f in failures.items()]
        )

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
            rank.close()
        self._ranks = []
        self._store = None
