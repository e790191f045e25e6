"""The launcher of another host than the first, in an elastic job: it owns its ranks, and the first one decides.

What its ranks say it passes on; what it is told it does. When it hears no more of the first launcher it ends its ranks
and itself: the job goes on without it, or is over.
"""

import time
from collections import deque
from collections.abc import Sequence
from multiprocessing import connection as mp_connection
from types import TracebackType
from typing import Any, Self, final

from uneven.elastic.ranks import ranks_of
from uneven.elastic.watch import BUSY_S
from uneven.elastic.wire import Wire
from uneven.launch.launcher import LaunchSettings
from uneven.launch.rank import BEAT_S, Message, Program
from uneven.layout import ParallelPlan

PATIENCE_S = 10.0
"""How much longer than the first launcher this one bears silence.

Of a short cut it is then told what became of it; and the first may be held up by lines to others.
"""


@final
class Agent:
    """As a context it ends the ranks of its host on leaving; `serve` returns when the job is over.

    Its arguments are those of the first launcher's `Fleet`.
    """

    def __init__(
        self,
        program: Program,
        args: tuple[Any, ...] = (),
        *,
        home: ParallelPlan,
        settings: LaunchSettings,
        reports: Sequence[type] = (),
    ) -> None:
        self._launcher = ranks_of(program, args, home=home, settings=settings)
        self._peers = settings.site.peers
        self._wire = Wire(home.structure, reports=reports)
        self._limit_s = BUSY_S
        self._heard_s = 0.0
        self._told_s = 0.0
        self._unsaid: list[list[Any]] = []
        self._beats: dict[int, list[Any]] = {}
        self._wishes: deque[Any] = deque()

    def __enter__(self) -> Self:
        self._launcher.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._launcher.__exit__(kind, error, tb)

    def tell(self, command: Any) -> None:
        """Ask the first launcher to send a command to all ranks. May be called from a signal handler."""
        self._wishes.append(command)

    def serve(self) -> None:
        """Do as the first launcher says until the job is over. Raises what ends the job, and HostLost."""
        self._heard_s = time.monotonic()
        while True:
            for message in self._launcher.poll(BEAT_S):
                self._take(message)
            self._pass_on()
            if self._peers.hear(mp_connection.wait(self._peers.lines, 0)):
                raise self._launcher.fail({})
            for _, order in self._peers.said():
                self._heard_s = time.monotonic()
                if "end" in order:
                    return
                self._obey(order)
            silent_s = time.monotonic() - self._heard_s
            if silent_s > self._limit_s + PATIENCE_S:
                self._peers.lose(0, f"{self._peers.name(0)} said nothing for {silent_s:.1f} s")
                raise self._launcher.fail({})

    def _take(self, message: Message) -> None:
        if message.kind == "error":
            raise self._launcher.fail({message.device: message.payload})
        encoded = [message.device, message.kind, self._wire.encode(message.payload)]
        if message.kind == "beat":
            self._beats[message.device] = encoded
        else:
            self._unsaid.append(encoded)

    def _pass_on(self) -> None:
        """What there is to say at once; signs of life several times a second, in one message."""
        wishes = [self._wire.encode(self._wishes.popleft()) for _ in range(len(self._wishes))]
        if not (self._unsaid or wishes) and time.monotonic() - self._told_s < BEAT_S:
            return
        messages = [*self._unsaid, *self._beats.values()]
        self._peers.say(0, {"messages": messages, "asked": wishes, "pids": self._launcher.pids})
        self._unsaid, self._beats = [], {}
        self._told_s = time.monotonic()

    def _obey(self, order: dict[str, Any]) -> None:
        if "limit_s" in order:
            self._limit_s = order["limit_s"]
        elif "start" in order:
            self._launcher.start(order["start"])
        elif "kill" in order:
            self._launcher.kill(order["kill"], order["signal"])
        else:
            command = self._wire.decode(order["tell"])
            for device in order["devices"]:
                self._launcher.tell(command, device=device)
