"""The process that ranks are forked from: it has torch and the models loaded, and no threads.

Importing torch takes seconds for each process; a fork takes milliseconds.
"""

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext

PRELOAD = ("__main__", "torch", "uneven.launch.rank", "uneven.parallel", "uneven.sync", "uneven.optim")


def zygote() -> ForkServerContext:
    """The multiprocessing context whose processes are forks of the zygote."""
    return multiprocessing.get_context("forkserver")


def warm_up(*modules: str) -> None:
    """Start the zygote now, so that it loads PRELOAD and `modules` while the caller does other things.

    Effective before the first rank is started; later calls change nothing.
    """
    zygote().set_forkserver_preload([*PRELOAD, *modules])
    # The tracker comes first, since starting it unblocks the signal.
    resource_tracker.ensure_running()
    with interrupts_blocked():
        forkserver.ensure_running()


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Hold Ctrl-C back until the end, and keep it from the processes that are started within.

    A terminal sends it to all processes of a job, and the launcher alone decides what it means.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
