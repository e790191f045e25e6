"""What a rank's main thread and the threads beside it tell each other: that it lives, and that it shall stop waiting.

A collective can't be ended from outside, so the main thread waits for it in slices, and looks up between them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final


@final
class Pulse:
    """`num_beats` grows whenever the main thread has got on; `waiting` names the purpose of the group it waits for.

    With `is_busy` it does something long that is no step, and may not get on for a while.

    `on_wait` is called with True where the main thread begins to wait for others, and with False after; `on_reach`
    where it comes to a named point of a step.
    """

    def __init__(self) -> None:
        self.num_beats = 0
        self.waiting = ""
        self.is_busy = False
        self.on_wait: Callable[[bool], None] | None = None
        self.on_reach: Callable[[str], None] | None = None
        self._interrupted = threading.Event()

    @property
    def is_interrupted(self) -> bool:
        return self._interrupted.is_set()

    def interrupt(self) -> None:
        """Make every wait of the main thread, now and from now on, end in PeerLost. Called by any thread."""
        self._interrupted.set()

    def resume(self) -> None:
        """Let the main thread wait again."""
        self._interrupted.clear()

    def beat(self) -> None:
        """The main thread has got on."""
        self.num_beats += 1

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around what may take the main thread long by itself."""
        before, self.is_busy = self.is_busy, True
        try:
            yield
        finally:
            self.is_busy = before
            self.beat()

    def reach(self, point: str) -> None:
        """The main thread is at a named point, where a test may want to stop it."""
        if self.on_reach is not None:
            self.on_reach(point)

    @contextmanager
    def wait(self, purpose: str) -> Iterator[None]:
        """Around a wait of the main thread for others."""
        self.waiting = purpose
        if self.on_wait is not None:
            self.on_wait(True)
        try:
            yield
        finally:
            if self.on_wait is not None:
                self.on_wait(False)
            self.waiting = ""
            self.beat()
