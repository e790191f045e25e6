"""Writers that are killed leave the checkpoints before them as they were: real processes, really killed."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.checkpoints import manifest_of, save, small_spec
from uneven.checkpoint.folder import find_checkpoints, newest, prune

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120

STEP_BY_STEP = """
    import os, signal, sys
    from pathlib import Path
    from tests.checkpoints import manifest_of, save, small_spec
    from uneven.checkpoint.folder import prune

    CALLS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir", "shutil.rmtree")

    def save_and_prune(run):
        manifest = manifest_of(small_spec().structure, tokens=11)
        sys.addaudithook(count)
        save(run, manifest)
        prune(run, keep=1)

    def count(event, _):
        # Audit hooks stay for the life of a process; each process here has one life to lose.
        if event in CALLS:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    run, left = Path(sys.argv[1]), [0]
    for calls in range(1000):
        child = os.fork()
        if child == 0:
            left[0] = calls
            save_and_prune(run / str(calls))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        print(calls, flush=True)
"""

FOR_EVER = """
    import itertools, sys
    from pathlib import Path
    import torch
    from uneven.checkpoint.folder import make_draft, part_file
    from uneven.checkpoint.manifest import Slice
    from uneven.checkpoint.write import write_part

    draft = make_draft(Path(sys.argv[1]), 70, tag="t")
    copy = ((Slice("a", "value", 0, 1000), torch.ones(1000, 4000)),)
    for device in itertools.count():
        write_part(copy, part_file(draft, device))
        print(device, flush=True)
"""


def python(script: str, run: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", textwrap.dedent(script), str(run)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("has_same_step", [False, True])
def test_a_save_that_is_killed_at_any_call_to_the_system_leaves_a_whole_checkpoint(
    tmp_path: Path, has_same_step: bool
) -> None:
    """The only one before it, or of the same step: with `keep` of one, there is no other to fall back on."""
    structure = small_spec().structure
    before = manifest_of(structure, step=60 if has_same_step else 50, tokens=10)
    save(tmp_path / "first", before)
    for calls in range(100):
        shutil.copytree(tmp_path / "first", tmp_path / str(calls))
    with python(STEP_BY_STEP, tmp_path) as process:
        killed = process.stdout.read().split()
        assert process.wait(TIMEOUT_S) == 0
    assert len(killed) > 10
    outcomes = set()
    for calls in killed:
        found = find_checkpoints(tmp_path / calls)
        assert newest(tmp_path / calls).manifest in (before, found[-1].manifest)
        assert found[-1].manifest.tokens in (10, 11)
        outcomes.add(tuple(each.manifest.tokens for each in found))
        # A later job cleans up, whatever state it was left in.
        prune(tmp_path / calls, keep=1)
        assert len(list((tmp_path / calls / "checkpoints").iterdir())) == 1
    assert outcomes == ({(10,), (11,)} if has_same_step else {(10,), (10, 11), (11,)})


def test_a_writer_that_is_killed_while_it_writes_leaves_a_draft_and_nothing_else(tmp_path: Path) -> None:
    before = save(tmp_path, manifest_of(small_spec().structure))
    with python(FOR_EVER, tmp_path) as process:
        assert process.stdout.readline() == "0\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert [each.folder for each in find_checkpoints(tmp_path)] == [before]
    assert (tmp_path / "checkpoints" / ".step-00000070.t" / "rank-0.safetensors").is_file()
    prune(tmp_path, keep=1)
    assert list((tmp_path / "checkpoints").iterdir()) == [before]
