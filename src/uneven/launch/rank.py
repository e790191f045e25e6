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
from uneven.errors import InputError, UnevenError


@dataclass(frozen=True, slots=True)
class RankSettings:
    """One rank's place in the job. `log` receives everything the process prints; None leaves it on the terminal."""

    device: int
    devices: tuple[int, ...]
    port: int
    transport: Transport
    num_threads: int
    log: Path | None


@dataclass(frozen=True, slots=True)
class Message:
    """From a rank to its launcher. Kinds: `post` and `result` carry a program's payload, `error` a Failure."""

    device: int
    kind: str
    payload: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ended: when (monotonic seconds of this host), its traceback, and the error if it was one of ours."""

    time_s: float
    text: str
    error: UnevenError | None = None


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
    torch.set_num_threads(settings.num_threads)
    mailbox = Mailbox(settings.device, connection)
    status = 1
    try:
        transport = settings.transport
        store = connect_store(transport.host, settings.port, timeout_s=transport.timeout_s)
        world = World(settings.device, settings.devices, store=store, transport=transport)
        mailbox.post(program(world, mailbox, *args), kind="result")
        status = 0
    except BaseException as error:
        text = traceback.format_exc()
        if settings.log is not None:
            print(text, file=sys.stderr, flush=True)
        mailbox.post(Failure(time.monotonic(), text, _portable(error)), kind="error")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without torch's teardown, which may wait for peers that are gone.
        os._exit(status)


def _portable(error: BaseException) -> UnevenError | None:
    """An error of this package, if it survives the way to another process."""
    if not isinstance(error, UnevenError):
        return None
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # anything may be raised by what a subclass holds; its traceback is sent all the same
        return None
    return copy if isinstance(copy, UnevenError) else None


def is_users_mistake(failure: Failure) -> bool:
    """Whether a rank ended over its input and not over a fault."""
    return isinstance(failure.error, InputError)


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
