"""The line between the launchers of one job: a star of TCP connections around the first of them.

It serves three ends. `exchange` gives to all what each of them says, so that all come to the same decision from the
same values. One that fails is heard by the others: the first launcher asks all what they have seen, and the earliest
failure ends the job everywhere. And in a job that outlives its hosts, `say` and `said` carry what the first launcher
and another have to tell each other. What is received is JSON and never run. Loads no torch.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, Self, final

from uneven.errors import HostLost, Interrupted, UnevenError
from uneven.launch.failure import TOLD_AS_THEMSELVES, Failure

REPORTS_S = 5.0
"""How long a launcher may take to say what it has seen of a failure."""
MAX_MESSAGE_BYTES = 64 * 2**20

Kind = Literal["host", "rank"]


@final
class Peers:
    """One launcher's lines: to all others if its index is 0, else to the first. Alone there are none.

    `kind` says what is counted: hosts, or the ranks that torchrun or Slurm started.
    """

    def __init__(
        self, names: Sequence[str] = ("",), *, index: int = 0, kind: Kind = "host", lines: Mapping[int, Connection]
    ) -> None:
        self.index = index
        self.kind = kind
        self.names = tuple(names)
        self._lines = dict(lines)
        self._heard: dict[int, dict[str, Any]] = {peer: {} for peer in lines}
        self._said: list[tuple[int, Any]] = []
        self._fenced: list[Connection] = []
        self._sending = threading.Lock()
        self._is_settled = False
        self._outlives_hosts = False
        self.gone: dict[int, str] = {}

    @property
    def count(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """As in "host 1 (node02)"."""
        return f"{self.kind} {index} ({self.names[index]})"

    @property
    def where(self) -> str:
        """The end of "rank 2 of 3": on which host, where there are several."""
        if self.count == 1:
            return ""
        return f" on {self.name(self.index)}" if self.kind == "host" else f" on {self.names[self.index]}"

    @property
    def lines(self) -> list[Connection]:
        """To wait for; what is ready goes to `hear`."""
        return list(self._lines.values())

    def hear(self, ready: Sequence[object]) -> bool:
        """Take a message from each of these lines; whether any has said that the job has failed."""
        for peer, line in list(self._lines.items()):
            if line in ready:
                self._take(peer, line)
        return any(heard.keys() & {"report", "alarm", "verdict"} for heard in self._heard.values())

    def _take(self, peer: int, line: Connection) -> None:
        try:
            what, value = json.loads(line.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError, ValueError):
            self.lose(peer, f"{self.name(peer)} is gone: it ended without a word, or its network did")
            return
        if what == "say":
            self._said.append((peer, value))
            return
        if what == "report":
            value = [Failure.from_json(each) for each in value]
        elif what == "verdict":
            value = Failure.from_json(value)
        self._heard[peer][what] = value

    def _tell(self, peer: int, message: tuple[str, Any]) -> None:
        data = json.dumps(message).encode()
        with self._sending:
            # One that is gone is heard of by its line.
            if peer in self._lines:
                try:
                    self._lines[peer].send_bytes(data)
                except BlockingIOError:
                    # Half a message may be out, after which none would be understood.
                    with socket.socket(fileno=os.dup(self._lines[peer].fileno())) as end, suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    # A job that outlives its hosts

    def outlive_hosts(self) -> None:
        """On the first launcher: that another is gone ends nothing from now on; `gone` tells which, and how."""
        self._outlives_hosts = True

    @property
    def others(self) -> list[int]:
        """Those at the other ends of the lines."""
        return list(self._lines)

    def say(self, peer: int, value: Any) -> None:
        """Tell one launcher something (JSON). Called by any thread."""
        self._tell(peer, ("say", value))

    def said(self) -> list[tuple[int, Any]]:
        """What others have said since the last time, and who; it is taken in by `hear`."""
        said, self._said = self._said, []
        return said

    def lose(self, peer: int, why: str) -> None:
        """Have no more to do with a launcher, which is taken to be gone."""
        with self._sending:
            self._lines.pop(peer).close()
        self._note_end(peer, why)

    def fence(self, peer: int, why: str) -> None:
        """Have no more to do with a launcher, and let it know, should it still be there."""
        text = f"the job went on without {self.name(peer)}: {why}"
        self._tell(peer, ("verdict", Failure(0.0, text, HostLost(text)).to_json()))
        with self._sending:
            # It stays open: a closed one would answer what the other has on its way, before that one reads this.
            self._fenced.append(self._lines.pop(peer))
        self._note_end(peer, why)

    def _note_end(self, peer: int, why: str) -> None:
        if self._outlives_hosts:
            self.gone[peer] = why
            del self._heard[peer]
            return
        gone = Failure(0.0, why, HostLost(why))
        self._heard[peer].setdefault(*(("verdict", gone) if peer == 0 else ("report", [gone])))

    # Values of all, and failures

    def exchange(self, value: Any) -> list[Any]:
        """What every launcher passes (JSON), by index; returns once all have called it. Raises what ended another."""
        if self.index > 0:
            self._tell(0, ("value", value))
        wanted = "values" if self.index > 0 else "value"
        while any(wanted not in heard for heard in self._heard.values()):
            if self.hear(mp_connection.wait(self.lines)):
                raise self.settle([])
        if self.index > 0:
            return list(self._heard[0].pop("values"))
        values = [value, *(self._heard[peer].pop("value") for peer in range(1, self.count))]
        for peer in self._heard:
            self._tell(peer, ("values", values))
        return list(json.loads(json.dumps(values)))

    def settle(self, failures: Sequence[Failure]) -> UnevenError:
        """The error to raise for what ended the job, the same for all: the earliest failure that any has seen.

        `failures` are those of this launcher, none if it only heard of one.
        """
        self._is_settled = True
        signed = [self._sign(failure) for failure in failures]
        first = self._judge(signed) if self.index == 0 else self._report(signed)
        return first.as_error()

    def _judge(self, failures: list[Failure]) -> Failure:
        asked = [peer for peer, heard in self._heard.items() if "report" not in heard]
        for peer in asked:
            self._tell(peer, ("alarm", None))
        self._listen_until(lambda: all("report" in self._heard[peer] for peer in asked))
        reported = [failure for heard in self._heard.values() for failure in heard.get("report", ())]
        first = min([*failures, *reported], key=lambda failure: failure.time_s)
        for peer in self._heard:
            self._tell(peer, ("verdict", first.to_json()))
        return first

    def _report(self, failures: list[Failure]) -> Failure:
        self._tell(0, ("report", [failure.to_json() for failure in failures]))
        self._listen_until(lambda: "verdict" in self._heard[0])
        silent = Failure(time.time(), f"{self.name(0)} does not say what ended the job")
        first = min([*failures, silent], key=lambda failure: failure.time_s)
        verdict: Failure = self._heard[0].get("verdict", first)
        return verdict

    def _sign(self, failure: Failure) -> Failure:
        """With whose it is, where the error itself does not say so."""
        if self.count == 1 or not failure.kind or isinstance(failure.error, HostLost):
            return failure
        error = TOLD_AS_THEMSELVES[failure.kind](f"{self.name(self.index)}: {failure.error}")
        return Failure(failure.time_s, failure.text, error)

    def _listen_until(self, is_enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + REPORTS_S
        while not is_enough() and self._lines:
            ready = mp_connection.wait(self.lines, max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            self.hear(ready)

    def give_up(self, error: BaseException) -> None:
        """Tell the others what ends this launcher, if they have not heard of it."""
        if self._is_settled:
            return
        self._is_settled = True
        if isinstance(error, KeyboardInterrupt | GeneratorExit):
            error = Interrupted("the user ended it")
        text = f"{self.name(self.index)}: {type(error).__name__}: {error}"
        told = self._sign(Failure(time.time(), text, error if isinstance(error, UnevenError) else None)).to_json()
        for peer in self._heard:
            self._tell(peer, ("verdict", told) if self.index == 0 else ("report", [told]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.give_up(error)
        for line in (*self._lines.values(), *self._fenced):
            line.close()
