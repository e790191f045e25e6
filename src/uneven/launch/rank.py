"""What runs inside a rank's process: its line to the launcher, its world, and the program it was started for."""

import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch

from uneven.comm import Pulse, Transport, World, connect_store
from uneven.errors import UnevenError
from uneven.launch.failure import Failure

BEAT_S = 0.2
"""How often a rank that hears nothing says that it lives."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """One rank's place in the job. `store` is where all ranks meet: host and port.

    `log` receives everything the process prints; None leaves it on the terminal.
    """

    device: int
    devices: tuple[int, ...]
    store: tuple[str, int]
    transport: Transport
    num_threads: int
    log: Path | None


@dataclass(frozen=True, slots=True)
class Message:
    """From a rank to its launcher.

    Kinds: `post` and `result` carry a program's payload, `error` a Failure, `beat` a Beat. `end` is the launcher's own
    word that a process has ended without any, with a Failure that says how.
    """

    device: int
    kind: str
    payload: Any


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life: what the rank's `Pulse` says."""

    num_beats: int
    waiting: str
    is_busy: bool


@final
class Mailbox:
    """A rank's line to its launcher."""

    def __init__(self, device: int, connection: Connection) -> None:
        self._device = device
        self._connection = connection
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[Any] | None = None

    def post(self, payload: Any, *, kind: str = "post") -> None:
        """Send anything that pickles. Called by any thread."""
        with self._sending:
            self._connection.send(Message(self._device, kind, payload))

    def listen(self, hear: Callable[[Any], bool], *, pulse: Pulse) -> None:
        """From now on a thread takes the commands: to `hear`, and to `poll` and `wait` where it returns False.

        It also tells the launcher, several times a second, whether the main thread gets on.
        """
        self._commands = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(hear, pulse), name="mailbox", daemon=True).start()

    def _serve(self, hear: Callable[[Any], bool], pulse: Pulse) -> None:
        assert self._commands is not None
        with suppress(EOFError, OSError):  # the launcher is gone, and the lifeline ends this process
            while True:
                if self._connection.poll(BEAT_S):
                    command = self._connection.recv()
                    if not hear(command):
                        self._commands.put(command)
                else:
                    self.post(Beat(pulse.num_beats, pulse.waiting, pulse.is_busy), kind="beat")

    def poll(self) -> Any | None:
        """The next command of the launcher, None if there is none yet."""
        if self._commands is not None:
            return None if self._commands.empty() else self._commands.get()
        return self._connection.recv() if self._connection.poll() else None

    def wait(self) -> Any:
        """The next command of the launcher, however long it takes."""
        return self._connection.recv() if self._commands is None else self._commands.get()


Program = Callable[..., Any]
"""`program(world, mailbox, *args)`, a module-level function; what it returns goes to the launcher."""


def run_rank(
    settings: RankSettings, *, connection: Connection, lifeline: Connection, program: Program, args: tuple[Any, ...]
) -> None:
    """The target of a rank's process; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_launcher, args=(lifeline,), daemon=True).start()
    if settings.log is not None:
        _redirect_output(settings.log)
    is_done = False
    try:
        is_done = run_program(settings, Mailbox(settings.device, connection), program=program, args=args)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without torch's teardown, which may wait for peers that are gone.
        os._exit(0 if is_done else 1)


def run_program(settings: RankSettings, mailbox: Mailbox, *, program: Program, args: tuple[Any, ...]) -> bool:
    """Join the job, run the program, and post its result or why there is none; whether there is one."""
    torch.set_num_threads(settings.num_threads)
    try:
        meet = partial(connect_store, *settings.store, timeout_s=settings.transport.timeout_s)
        world = World(settings.device, settings.devices, store=meet, transport=settings.transport)
        mailbox.post(program(world, mailbox, *args), kind="result")
    except BaseException as error:
        now = time.time()
        text = traceback.format_exc()
        if settings.log is not None:
            print(text, file=sys.stderr, flush=True)
        mailbox.post(Failure(now, text, _portable(error)), kind="error")
        return False
    return True


def _portable(error: BaseException) -> UnevenError | None:
    """An error of this package, if it survives the way to another process."""
    if not isinstance(error, UnevenError):
        return None
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # anything may be raised by what a subclass holds; its traceback is sent all the same
        return None
    return copy if isinstance(copy, UnevenError) else None


def _die_with_launcher(lifeline: Connection) -> None:
    """Wait until the launcher's end closes, then end the process, whatever its main thread is blocked in."""
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
