"""A member's line to the coordinator: what a thread hears of it while the main thread may be blocked."""

import signal
import threading
from collections.abc import Callable
from typing import Any, final

from uneven.comm import World
from uneven.elastic.faults import Point, Reached, Stops
from uneven.elastic.quorum import Over, Quorum, Ready, Wish
from uneven.errors import Left
from uneven.launch.rank import Mailbox


@final
class Line:
    """Hears quorums, interrupts the main thread for those that can't wait, and stops it where faults are to happen.

    `attempt` gives the number of the step that is being attempted. SIGTERM is a notice that the device will be taken
    away, if this is the main thread of a process.
    """

    def __init__(self, world: World, mailbox: Mailbox, *, attempt: Callable[[], int]) -> None:
        self.entered = -1
        self._world = world
        self._mailbox = mailbox
        self._attempt = attempt
        self._announced: Quorum | None = None
        self._is_over = False
        self._is_leaving = False
        self._news = threading.Condition()
        self._stops: tuple[Point, ...] = ()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._take_notice)
        world.pulse.on_reach = self._reach
        mailbox.listen(self._hear, pulse=world.pulse)
        mailbox.post(Ready())

    @property
    def is_change_announced(self) -> bool:
        """Whether there is a quorum that this rank has not tried to enter."""
        return self._announced is not None and self._announced.generation > self.entered

    def await_quorum(self) -> Quorum:
        """The newest quorum, once there is one that has not been tried. Raises Left if there will be none."""
        with self._world.pulse.wait("quorum"), self._news:
            self._news.wait_for(lambda: self.is_change_announced or self._is_over)
            if self._is_over or self._announced is None:
                raise Left(f"the job of device {self._world.device} is over")
            self.entered = self._announced.generation
            self._world.pulse.resume()
            return self._announced

    def pass_notice_on(self) -> None:
        """Ask to leave, if this device is about to be taken away."""
        if self._is_leaving:
            self._is_leaving = False
            self._mailbox.post(Wish())

    def _take_notice(self, *_: object) -> None:
        self._is_leaving = True  # and no more: the main thread may hold the line's lock

    def _hear(self, command: Any) -> bool:
        if isinstance(command, Stops):
            self._stops = command.points
            return True
        if not isinstance(command, Quorum | Over):
            return False
        with self._news:
            if isinstance(command, Over):
                self._is_over = True
            else:
                self._announced = command
                if not command.is_planned:
                    self._world.interrupt()
            self._news.notify()
        return True

    def _reach(self, phase: str) -> None:
        """Stop at a point where a fault is to happen."""
        step = self._attempt()
        for point in self._stops:
            if point.phase == phase and point.step in (None, step):
                self._stops = tuple(other for other in self._stops if other is not point)
                self._mailbox.post(Reached(point, step))
                with self._world.pulse.wait("fault"):
                    threading.Event().wait()  # for what is to happen from outside
