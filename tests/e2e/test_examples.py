"""The examples run as a reader runs them."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_library_trains_on_two_replicas(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "library.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"\d+\.\d+", done.stdout)]
    assert len(losses) == 20
    assert losses[0] > 5  # ln 256 = 5.5, chance
    assert losses[-1] < 0.5 * losses[0]
