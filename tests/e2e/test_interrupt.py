"""Ctrl-C is exit code 1, also where it comes while a module is being loaded through exec()."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys
from uneven.cli import main as entry

class Commands:
    def find_spec(self, name, path=None, target=None):
        if name == "uneven.cli.app":
            exec("os.kill(os.getpid(), signal.SIGINT)")

sys.meta_path.insert(0, Commands())
entry.main()
"""


def test_ctrl_c_while_the_commands_load_is_code_1(tmp_path: Path) -> None:
    """As a module: Python decides about its end otherwise there than for a script."""
    (tmp_path / "job.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "job"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (1, "Interrupted: ended before it began\n")


BLOCKED = """
import sys, threading
from uneven.cli import main as entry
from uneven.errors import InputError
from uneven.launch import RANK_THREAD

class Commands:
    def find_spec(self, name, path=None, target=None):
        if name == "uneven.cli.app":
            threading.Thread(target=threading.Event().wait, name=RANK_THREAD).start()
            raise InputError("too large")

sys.meta_path.insert(0, Commands())
entry.main()
"""


def test_a_rank_that_is_blocked_does_not_hold_up_the_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BLOCKED]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (2, "error: too large\n")
