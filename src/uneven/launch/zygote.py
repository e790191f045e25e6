"""The process that ranks are forked from: it has torch and the models loaded, and no threads.

Importing torch takes seconds for each process; a fork takes milliseconds.
"""

import multiprocessing
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
    forkserver.ensure_running()
