"""The process that ranks are forked from: it has torch and the models loaded, and no threads.

Importing torch takes seconds for each process; a fork takes milliseconds.
"""

import multiprocessing
import signal
from multiprocessing import forkserver
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
    # A terminal sends Ctrl-C to all processes of a job, and the launcher alone decides what it means: the zygote and
    # the ranks inherit the signal blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
