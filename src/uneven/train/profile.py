"""A rank's steps as a trace that Perfetto and chrome://tracing show.

The first steps are left out: they build caches and buffers, and are like no other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

FIRST, LAST = 3, 5
"""The steps that are traced, or the last one of a job that has no more than two."""


@final
class StepProfiler:
    """Traces the steps FIRST to LAST into `file`; with None it only names them for whoever traces."""

    def __init__(self, file: Path | None, *, num_steps: int, device: torch.device) -> None:
        self._file = file
        self._first = min(FIRST, num_steps)
        self._activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        self._running: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step."""
        if self._file is not None and number == self._first:
            self._running = profile(activities=self._activities)
            self._running.start()
        with record_function(f"step {number}"):
            yield
        if number == LAST:
            self.close()

    def close(self) -> None:
        """Write what has been traced, if that has not been done."""
        if self._running is not None:
            self._running.stop()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._running.export_chrome_trace(str(self._file))
            self._running = None
