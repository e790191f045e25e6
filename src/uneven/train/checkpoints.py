"""The launcher's side of checkpoints: one is published when all ranks have written their parts of it."""

import time
from pathlib import Path
from typing import final

from uneven.checkpoint.folder import make_draft, prune, publish
from uneven.checkpoint.manifest import Manifest, Part
from uneven.elastic.coordinator import Coordinator
from uneven.elastic.saving import PartWritten
from uneven.errors import CheckpointError
from uneven.train.job import Job


@final
class Publisher:
    """Collects parts, publishes checkpoints, has the coordinator know the newest, and removes old ones."""

    def __init__(self, job: Job, folder: Path, *, coordinator: Coordinator) -> None:
        self._job = job
        self._folder = folder
        self._coordinator = coordinator
        self._parts: dict[tuple[int, int], dict[int, Part]] = {}

    def take(self, device: int, written: PartWritten, *, tokens: int) -> str:
        """A rank has written its part; what to say of it, if anything: that a checkpoint is whole, or why it is not."""
        if written.part is None:
            return f"device {device} could not write its part: {written.problem}"
        key = (written.generation, written.step)
        parts = self._parts.setdefault(key, {})
        parts[device] = written.part
        if len(parts) < written.num_parts:
            return ""
        self._parts = {other: found for other, found in self._parts.items() if other > key}
        try:
            return self._publish(written, parts, tokens=tokens)
        except CheckpointError as error:
            return f"can't be published: {error}"

    def _publish(self, written: PartWritten, parts: dict[int, Part], *, tokens: int) -> str:
        config, design = self._job.config, self._job.design
        draft = make_draft(self._folder, written.step, tag=f"generation-{written.generation}")
        manifest = Manifest(
            step=written.step,
            num_updates=written.num_updates,
            tokens=tokens,
            time_s=time.time(),
            seed=config.seed,
            dtype=written.dtype,
            structure=design.spec.structure,
            config=design.spec.config,
            parts=tuple(parts[device] for device in sorted(parts)),
            buffers={name: list(shape) for name, shape in written.buffers},
            extra={"samples": written.step * config.train.global_batch},
        )
        self._coordinator.checkpoint = publish(draft, manifest)
        saving = config.checkpoint
        prune(self._folder, keep=saving.keep, keep_every_s=saving.keep_every_s)
        return self._coordinator.checkpoint.name
