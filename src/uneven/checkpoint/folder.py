"""The checkpoints of a run: drafts become checkpoints by one rename, old ones go, and what is no checkpoint is refused.

`RUN/checkpoints/step-00000060` is whole, whatever has crashed: it was `.step-00000060.TAG` until its files and its
manifest were on the disk, and is one again before anything of it is removed. Loads no torch.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from uneven.checkpoint.manifest import Manifest
from uneven.errors import CheckpointError, CheckpointRefused

CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"
NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
"""A step, and for one that was written again, as after going back to an earlier one, how often."""
DRAFT = re.compile(r"\.step-\d+\..+")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder and its manifest."""

    folder: Path
    manifest: Manifest


def make_draft(run: Path, step: int, *, tag: str) -> Path:
    """The folder where the ranks of a job write their parts of a checkpoint; `tag` names this save, on all hosts."""
    draft = run / CHECKPOINTS / f".step-{step:08d}.{tag}"
    with writing(draft):
        draft.mkdir(parents=True, exist_ok=True)
    return draft


def part_file(draft: Path, device: int) -> Path:
    """The file of what one device writes."""
    return draft / f"rank-{device}.safetensors"


def publish(draft: Path, manifest: Manifest) -> Path:
    """Make a checkpoint of a draft whose parts are written and synced; returns its folder.

    Raises CheckpointError if a part is not there as it should be, or for what the disk says.
    """
    with writing(draft):
        _check_files(draft, manifest)
        with (draft / MANIFEST).open("w", encoding="utf-8") as stream:
            stream.write(manifest.dumps())
            stream.flush()
            os.fsync(stream.fileno())
        sync(draft)
        # Not in the place of an older one of the step: taking that away first, a crash would leave neither.
        versions = [version for step, version, _ in _named(draft.parent) if step == manifest.step]
        suffix = f".{versions[-1] + 1}" if versions else ""
        folder = draft.with_name(f"step-{manifest.step:08d}{suffix}")
        draft.rename(folder)
        sync(folder.parent)
    return folder


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint, its files present and of their size; contents are checked as they are read.

    Raises CheckpointRefused, with the file at fault.
    """
    file = folder / MANIFEST
    try:
        manifest = Manifest.loads(file.read_bytes(), where=str(file))
        _check_files(folder, manifest)
    except OSError as error:
        raise CheckpointRefused(f"{error.filename or file}: can't read the checkpoint: {error.strerror}") from None
    return Checkpoint(folder, manifest)


def find_checkpoints(run: Path) -> list[Checkpoint]:
    """The whole checkpoints of a run by ascending step, the last one of each step; drafts and broken ones are none."""
    return list({each.manifest.step: each for each in _whole(run / CHECKPOINTS)}.values())


def newest(run: Path, *, step: int | None = None) -> Checkpoint:
    """The last whole checkpoint of a run, or that of `step`. Raises CheckpointRefused: what is there instead."""
    named = _named(run / CHECKPOINTS)
    problem = f"there is {', '.join(folder.name for _, _, folder in named) or 'none'}"
    for folder in (folder for at, _, folder in reversed(named) if step in (None, at)):
        try:
            return open_checkpoint(folder)
        except CheckpointRefused as error:
            problem = str(error)
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise CheckpointRefused(f"{run / CHECKPOINTS}: no {wanted} can be used: {problem}")


def prune(run: Path, *, keep: int, keep_every_s: float | None = None, active: Path | None = None) -> None:
    """Remove checkpoints but the last `keep` of them, at least one, and the last one of every `keep_every_s` seconds.

    Removes all drafts but `active`, too: a run has one writer. Broken checkpoints stay for someone to look at.
    """
    top, found = run / CHECKPOINTS, find_checkpoints(run)
    kept = {each.folder for each in found[-max(keep, 1) :]}
    if keep_every_s is not None:
        kept |= set({each.manifest.time_s // keep_every_s: each.folder for each in found}.values())
    with writing(top):
        for folder in [each.folder for each in _whole(top) if each.folder not in kept]:
            folder.rename(folder.with_name(f".{folder.name.partition('.')[0]}.removed-{folder.name}"))
        for folder in top.iterdir() if top.is_dir() else ():
            if DRAFT.fullmatch(folder.name) and folder != active:
                shutil.rmtree(folder)


def _whole(top: Path) -> Iterator[Checkpoint]:
    """By ascending step and version."""
    for _, _, folder in _named(top):
        with suppress(CheckpointRefused):
            yield open_checkpoint(folder)


def _named(top: Path) -> list[tuple[int, int, Path]]:
    """Step, version and folder of all that is called like a checkpoint, ascending."""
    matches = [(NAME.fullmatch(folder.name), folder) for folder in (top.iterdir() if top.is_dir() else ())]
    return sorted((int(match[1]), int(match[2] or 0), folder) for match, folder in matches if match)


def _check_files(folder: Path, manifest: Manifest) -> None:
    for part in manifest.parts:
        file = folder / part.file
        size = file.stat().st_size
        if size != part.num_bytes:
            raise CheckpointRefused(f"{file}: has {size:,} bytes, its manifest says {part.num_bytes:,}; it is damaged")


def sync(path: Path) -> None:
    """Have the disk know a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(where: Path) -> Iterator[None]:
    """Turn what the disk says into a CheckpointError."""
    try:
        yield
    except OSError as error:
        place = error.filename or where
        raise CheckpointError(f"{place}: can't write the checkpoint: {error.strerror or error}") from None
