"""The way in. Exit codes: 0 done, 2 the user's mistake, 1 anything else."""

import errno
import os
import signal
import sys
import threading

from uneven.errors import InputError, UnevenError
from uneven.launch import RANK_THREAD

USERS_PATHS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EROFS)
"""What the system says of a path that was given wrongly."""


def main() -> None:
    """Run the command line; an error of this package becomes one message and an exit code."""
    # An end from outside is cleaned up after like Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        # Here and not at the top: Ctrl-C while the commands load must not show where.
        from uneven.cli.app import app

        app()
    except InputError as error:
        _end(f"error: {error}", code=2)
    except UnevenError as error:
        _end(f"{type(error).__name__}: {error}", code=1)
    except KeyboardInterrupt:
        _end("Interrupted: ended before it began", code=1)
    except OSError as error:
        if error.errno not in USERS_PATHS:
            raise
        _end(f"error: {error.filename}: {error.strerror}", code=2)


def _end(message: str, *, code: int) -> None:
    print(message, file=sys.stderr)
    # CPython remembers a Ctrl-C that came inside of exec(), as dataclasses call it, and would at the end kill the
    # process by signal instead of with `code`; another exec() makes it forget.
    exec("")
    if any(thread.name == RANK_THREAD for thread in threading.enumerate()):
        # It may be blocked in a collective, and nothing but the process's end frees it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
