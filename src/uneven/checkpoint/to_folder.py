"""A checkpoint as a plain Hugging Face folder, made by one process without the job's devices.

Parameter by parameter, so that it holds what waits for one file and no more.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from uneven.checkpoint.export import MAX_FILE_BYTES, FolderWriter, write_config
from uneven.checkpoint.folder import Checkpoint, sync, writing
from uneven.checkpoint.reader import DTYPES
from uneven.checkpoint.restore import read_slices
from uneven.checkpoint.slices import BUFFER, STATE, Slice, held_slices
from uneven.errors import CheckpointError, CheckpointRefused

VALUE = STATE[0]


def export_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    *,
    extras: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `config.json`, the weights in the job's dtype, and the files of the folder `extras`, a tokenizer's.

    `out` is absent or empty, and appears when it is whole. `progress` hears of elements. Raises CheckpointRefused.
    """
    draft = out.absolute().with_name(f".{out.absolute().name}.{uuid.uuid4().hex}")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise CheckpointRefused(f"{out}: can't make this folder: {error.strerror}") from None
    try:
        with writing(draft):
            writer = FolderWriter(draft, max_file_bytes)
            read_slices(
                checkpoint, chain(_parameters(checkpoint, writer, progress=progress), _buffers(checkpoint, writer))
            )
            writer.close()
            _write_config(checkpoint, draft)
            for file in sorted(extras.iterdir()) if extras is not None and extras.is_dir() else ():
                shutil.copy(file, draft)
            for file in draft.iterdir():
                sync(file)
            sync(draft)
            draft.rename(out)
            sync(out.absolute().parent)
    except SafetensorError as error:  # what it makes of a full disk
        raise CheckpointError(f"{draft}: can't write weights: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _parameters(
    checkpoint: Checkpoint, writer: FolderWriter, *, progress: Callable[[int, int], None]
) -> Iterator[tuple[Slice, torch.Tensor]]:
    """What is to be read, as the matrices that a checkpoint knows; each goes to `writer` once it has been."""
    total, done = checkpoint.manifest.structure.num_parameters, 0
    for spec in checkpoint.manifest.structure.parameters:
        (whole,) = held_slices(spec, VALUE, ranges=None)
        tensor = torch.empty(spec.shape, dtype=_dtype(checkpoint))
        yield whole, tensor.view(whole.shape)
        writer.add(spec.name, tensor)
        done += tensor.numel()
        progress(done, total)


def _buffers(checkpoint: Checkpoint, writer: FolderWriter) -> Iterator[tuple[Slice, torch.Tensor]]:
    """As `_parameters`, in the dtypes that buffers have."""
    dtypes = {stored.slice.name: stored.dtype for part in checkpoint.manifest.parts for stored in part.tensors}
    for name, shape in checkpoint.manifest.buffers.items():
        tensor = torch.empty(shape, dtype=DTYPES[dtypes[name]])
        yield Slice(name, BUFFER, (0, 1), (0, tensor.numel())), tensor.view(1, -1)
        writer.add(name, tensor)


def _dtype(checkpoint: Checkpoint) -> torch.dtype:
    found = getattr(torch, checkpoint.manifest.dtype, None)
    if found not in DTYPES.values():
        raise CheckpointRefused(f"{checkpoint.folder}: has weights of the unknown dtype {checkpoint.manifest.dtype!r}")
    return found


def _write_config(checkpoint: Checkpoint, folder: Path) -> None:
    manifest = checkpoint.manifest
    family = manifest.config.get("model_type")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    if architecture is None:
        raise CheckpointRefused(f"{checkpoint.folder}: transformers has no causal language model {family!r}")
    write_config(folder, manifest.config, architecture=architecture, dtype=manifest.dtype)
