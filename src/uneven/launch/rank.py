"""What runs inside a rank's process: its line to the launcher, its world, and the program it was started for."""

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch

from uneven.comm import Transport, World, connect_store
from uneven.errors import UnevenError
from uneven.launch.failure import Failure


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
    """From a rank to its launcher. Kinds: `post` and `result` carry a program's payload, `error` a Failure."""

    device: int
    kind: str
    payload: Any


@final
class Mailbox:
    """A rank's line to its launcher."""

    def __init__(self, device: int, connection: Connection) -> None:
        self._device = device
        self._connection = connection

    def post(self, payload: Any, *, kind: str = "post") -> None:
        """Send anything that pickles."""
        self._connection.send(Message(self._device, kind, payload))

    def poll(self) -> Any | None:
        """The next command of the launcher, None if there is none yet."""
        return self._connection.recv() if self._connection.poll() else None

    def wait(self) -> Any:
        """The next command of the launcher, however long it takes."""
        return self._connection.recv()


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
        store = connect_store(*settings.store, timeout_s=settings.transport.timeout_s)
        world = World(settings.device, settings.devices, store=store, transport=settings.transport)
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
