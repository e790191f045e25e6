"""The checkpoints of a run: drafts become checkpoints by one rename, old ones go, and what is no checkpoint is refused.

`RUN/checkpoints/step-00000060` is whole, whatever has crashed: it was `.step-00000060.TAG` until its files and its
manifest were on the disk, and is one again before anything of it is removed. Loads no torch.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
    """A folder, its manifest, and the bytes that were read to know it."""

    folder: Path
    manifest: Manifest
    manifest_bytes: int


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
        suffix = f".{max(versions) + 1}" if versions else ""
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
        content = file.read_bytes()
        manifest = Manifest.loads(content.decode(), where=str(file))
        _check_files(folder, manifest)
    except UnicodeDecodeError as error:
        raise CheckpointRefused(f"{file}: not JSON: {error}") from None
    except OSError as error:
        raise CheckpointRefused(f"{error.filename or file}: can't read the checkpoint: {error.strerror}") from None
    return Checkpoint(folder, manifest, len(content))


def find_checkpoints(run: Path) -> list[Checkpoint]:
    """The whole checkpoints of a run by ascending step, the last one of each step; drafts and broken ones are none."""
    found = {}
    for step, _, folder in _named(run / CHECKPOINTS):
        try:
            found[step] = open_checkpoint(folder)
        except CheckpointRefused:
            continue
    return list(found.values())


def newest(run: Path, *, step: int | None = None) -> Checkpoint:
    """The last whole checkpoint of a run, or that of `step`. Raises CheckpointRefused: what is there instead."""
    problem = "there is none"
    named = [(at, folder) for at, _, folder in _named(run / CHECKPOINTS) if step in (None, at)]
    for _, folder in reversed(named):
        try:
            return open_checkpoint(folder)
        except CheckpointRefused as error:
            problem = str(error)
    steps = sorted({at for at, _, _ in _named(run / CHECKPOINTS)})
    have = f"; there are checkpoints of the steps {', '.join(map(str, steps))}" if steps and not named else ""
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise CheckpointRefused(f"{run / CHECKPOINTS}: no {wanted} can be used: {problem}{have}")


def prune(run: Path, *, keep: int, keep_every_s: float | None = None, active: Path | None = None) -> None:
    """Remove checkpoints but the last `keep` of them, at least one, and the last one of every `keep_every_s` seconds.

    Removes all drafts but `active`, too: a run has one writer. Broken checkpoints stay for someone to look at.
    """
    found = find_checkpoints(run)
    kept = {each.folder for each in found[-max(keep, 1) :]}
    if keep_every_s is not None:
        kept |= set({each.manifest.time_s // keep_every_s: each.folder for each in found}.values())
    top = run / CHECKPOINTS
    with writing(top):
        superseded = _superseded(top, whole={each.folder for each in found})
        for folder in [*superseded, *(each.folder for each in found if each.folder not in kept)]:
            folder.rename(folder.with_name(f".{folder.name.partition('.')[0]}.removed-{folder.name}"))
        for folder in top.iterdir() if top.is_dir() else ():
            if DRAFT.fullmatch(folder.name) and folder != active:
                shutil.rmtree(folder)


def _superseded(top: Path, *, whole: set[Path]) -> list[Path]:
    """Checkpoints, whole or not, of whose step a later one is whole."""
    named = list(_named(top))
    latest = {step: version for step, version, folder in named if folder in whole}
    return [folder for step, version, folder in named if version < latest.get(step, 0)]


def _named(top: Path) -> Iterator[tuple[int, int, Path]]:
    """Step, version and folder of all that is called like a checkpoint, ascending."""
    found = []
    for folder in top.iterdir() if top.is_dir() else ():
        match = NAME.fullmatch(folder.name)
        if match:
            found.append((int(match[1]), int(match[2] or 0), folder))
    return iter(sorted(found))


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
