"""A checkpoint as a plain Hugging Face folder, made by one process without the job's devices.

Parameter by parameter, so that it holds what waits for one file and no more.
"""

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from uneven.checkpoint.export import MAX_FILE_BYTES, FolderWriter, flat_tile, write_config
from uneven.checkpoint.folder import Checkpoint, sync, writing
from uneven.checkpoint.manifest import BUFFER, VALUE
from uneven.checkpoint.reader import DTYPES
from uneven.checkpoint.restore import read_tiles
from uneven.errors import CheckpointError, CheckpointRefused
from uneven.reshard import Tiles, tiles_of


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
    manifest = checkpoint.manifest
    family = manifest.config.get("model_type")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    if architecture is None:
        raise CheckpointRefused(f"{checkpoint.folder}: transformers has no causal language model {family!r}")
    draft = out.absolute().with_name(f".{out.absolute().name}.{uuid.uuid4().hex}")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise CheckpointRefused(f"{out}: can't make this folder: {error.strerror}") from None
    try:
        with writing(draft):
            writer = FolderWriter(draft, max_file_bytes)
            read_tiles(checkpoint, _wanted(checkpoint, writer, progress=progress))
            writer.close()
            write_config(draft, manifest.config, architecture=architecture, dtype=manifest.dtype)
            if extras is not None and extras.is_dir():
                shutil.copytree(extras, draft, dirs_exist_ok=True)
            for file in draft.iterdir():
                sync(file)
            sync(draft)
            draft.rename(out)
            sync(out.absolute().parent)
    except SafetensorError as error:  # what it makes of a full disk
        raise CheckpointError(f"{draft}: can't write weights: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _wanted(
    checkpoint: Checkpoint, writer: FolderWriter, *, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, Tiles]]:
    """What is to be read, whole; each tensor goes to `writer` once it has been."""
    manifest, done = checkpoint.manifest, 0
    dtype = getattr(torch, manifest.dtype, None)
    if dtype not in DTYPES.values():
        raise CheckpointRefused(f"{checkpoint.folder}: has weights of the unknown dtype {manifest.dtype!r}")
    for spec in manifest.structure.parameters:
        tensor = torch.empty(spec.shape, dtype=dtype)
        yield VALUE, {spec.name: tiles_of(tensor, spec, ranges=spec.whole)}
        writer.add(spec.name, tensor)
        done += tensor.numel()
        progress(done, manifest.structure.num_parameters)
    dtypes = {stored.slice.name: stored.dtype for part in manifest.parts for stored in part.tensors}
    for name, shape in manifest.buffers.items():
        tensor = torch.empty(shape, dtype=DTYPES[dtypes[name]])
        yield BUFFER, {name: flat_tile(tensor)}
        writer.add(name, tensor)
