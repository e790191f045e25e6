"""Read a divided model from a plain Hugging Face folder: each rank its own slices, never a whole model."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from uneven.errors import ModelError
from uneven.layout import ModelLayout, ParameterSpec, Shard
from uneven.modelspec import WEIGHTS, WEIGHTS_INDEX


def load_model(model: PreTrainedModel, layout: ModelLayout, *, folder: Path, device: int) -> None:
    """Fill a model divided by `parallelize` with what `device` holds of the weights in `folder`, in the model's dtype.

    Communicates nothing. Raises ModelError, naming file and parameter, where the folder has not this model.
    """
    parameters = dict(model.named_parameters())
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for spec, path in locate(folder, layout).items():
            try:
                if path not in files:
                    files[path] = stack.enter_context(safe_open(path, framework="pt"))
                local = _read(files[path], spec, layout=layout, device=device, path=path)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: can't read {spec.name}: {error}") from None
            with torch.no_grad():
                parameters[spec.name].copy_(local)
            del local  # before the next one is read


def locate(folder: Path, layout: ModelLayout) -> Mapping[ParameterSpec, Path]:
    """The file that holds each parameter of the model."""
    if (folder / WEIGHTS_INDEX).is_file():
        try:
            weight_map = json.loads((folder / WEIGHTS_INDEX).read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ModelError(f"{folder / WEIGHTS_INDEX}: malformed index ({type(error).__name__}: {error})") from None
        missing = [spec.name for spec in layout.structure.parameters if spec.name not in weight_map]
        if missing:
            raise ModelError(f"{folder / WEIGHTS_INDEX}: names no file for {missing[0]} (and {len(missing) - 1} more)")
        return {spec: folder / weight_map[spec.name] for spec in layout.structure.parameters}
    return dict.fromkeys(layout.structure.parameters, folder / WEIGHTS)


def _read(file: Any, spec: ParameterSpec, *, layout: ModelLayout, device: int, path: Path) -> torch.Tensor:
    piece = file.get_slice(spec.name)
    found = tuple(piece.get_shape())
    if found != spec.shape:
        raise ModelError(f"{path}: {spec.name} has shape {found}, the model's configuration says {spec.shape}")
    ranges = layout.spec_ranges(spec, device)
    if ranges is None or not isinstance(spec.placement, Shard):
        return piece[:]
    before = (slice(None),) * spec.placement.dim
    parts = [piece[(*before, slice(start, stop))] for start, stop in ranges]
    return torch.cat(parts, spec.placement.dim) if parts else torch.empty(layout.local_shape(spec, device))
