"""A rank's side of a checkpoint: a copy at a step boundary, written by a thread while steps go on.

Nobody waits for anybody: who is still writing the last one leaves the next one out, which is then never whole.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch

from uneven.checkpoint.export import flat_tile, saved_buffers
from uneven.checkpoint.folder import Checkpoint, make_draft, part_file
from uneven.checkpoint.manifest import BUFFER, STATE, VALUE, Part
from uneven.checkpoint.restore import read_tiles
from uneven.checkpoint.write import copy_tiles, start_writing, written_by
from uneven.elastic.division import Division
from uneven.errors import CheckpointError
from uneven.launch.rank import Mailbox
from uneven.layout import shards_of
from uneven.reshard import Tiles


@dataclass(frozen=True, slots=True)
class PartWritten:
    """To the launcher: this rank's part of the checkpoint of a step is on the disk; or why there will be none.

    Of `num_parts`, written under one generation, of a model in `dtype`.
    """

    step: int
    num_updates: int
    generation: int
    num_parts: int
    dtype: str
    part: Part | None = None
    buffers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    problem: str = ""


@final
class Saver:
    """Saves a rank's parts of checkpoints into the folder of a run."""

    def __init__(self, run: Path, *, device: int, mailbox: Mailbox) -> None:
        self._run = run
        self._device = device
        self._mailbox = mailbox
        self._writing: Future[Part] | None = None
        self._draft: PartWritten | None = None

    @torch.no_grad()
    def save(self, division: Division, *, step: int, num_updates: int, generation: int) -> None:
        """Copy what this rank writes, and start to write it; nothing if it still writes."""
        self.poll()
        if self._writing is not None:
            return
        plan, model = division.plan, division.model
        shapes = tuple((name, tuple(buffer.shape)) for name, buffer in saved_buffers(model))
        written = written_by(plan, shards_of(plan, division.recipe.copies), buffers=dict(shapes))
        copy = copy_tiles(state_tiles(division), written[self._device])
        dtype = str(division.optimizer.dtype).removeprefix("torch.")
        self._draft = PartWritten(step, num_updates, generation, len(plan.devices), dtype, buffers=shapes)
        try:
            draft = make_draft(self._run, step, tag=f"generation-{generation}")
        except CheckpointError as error:
            self._tell(None, str(error))
            return
        self._writing = start_writing(copy, part_file(draft, self._device))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Tell the launcher of what has been written, after waiting for it for so long at most."""
        if self._writing is None:
            return
        with contextlib.suppress(Late):
            try:
                self._tell(self._writing.result(timeout_s), "")
            except CheckpointError as error:
                self._tell(None, str(error))
            self._writing = None

    def _tell(self, part: Part | None, problem: str) -> None:
        assert self._draft is not None
        self._mailbox.post(replace(self._draft, part=part, problem=problem))


def state_tiles(division: Division) -> Sequence[tuple[str, Tiles]]:
    """A division's trained state by kind, as checkpoints have it."""
    optimizer = division.optimizer
    value = optimizer.tiles("master") if "master" in optimizer.kinds else optimizer.parameters
    moments = [(kind, optimizer.tiles(kind)) for kind in STATE if kind != VALUE]
    return [(VALUE, value), *moments, (BUFFER, _buffers(division))]


def _buffers(division: Division) -> Tiles:
    return {name: flat_tile(buffer) for name, buffer in saved_buffers(division.model)}


def restore(division: Division, checkpoint: Checkpoint) -> int:
    """Fill a division from a checkpoint of its model, whatever plan wrote it; returns the bytes read.

    Raises CheckpointRefused.
    """
    checkpoint.manifest.check_model(division.plan.structure, where=str(checkpoint.folder))
    optimizer = division.optimizer
    masters = [(VALUE, optimizer.tiles("master"))] if "master" in optimizer.kinds else []
    moments = [(kind, optimizer.tiles(kind)) for kind in STATE if kind != VALUE]
    state = [(VALUE, optimizer.parameters), *masters, *moments, (BUFFER, _buffers(division))]
    return read_tiles(checkpoint, state)
