"""Safetensors files made by hand, without torch: sound ones, of zeros, and damaged ones."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from uneven.modelspec import ModelSpec

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I32": 4, "F8_E4M3": 1}

Shapes = Mapping[str, tuple[int, ...]]


def write_weights(file: Path, shapes: Shapes, *, dtype: str = "F32", dtypes: Mapping[str, str] | None = None) -> None:
    """Zeros of these shapes, in `dtype` unless `dtypes` has another one for a name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        kind = (dtypes or {}).get(name, dtype)
        size = BYTES[kind]
        for length in shape:
            size *= length
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    content = json.dumps(header).encode()
    file.write_bytes(len(content).to_bytes(8, "little") + content + bytes(end))


def write_shards(folder: Path, shapes: Shapes, *, num_files: int = 2) -> Path:
    """The same over several files with an index, which is returned."""
    names = list(shapes)
    weight_map = {name: f"model-{index % num_files}.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        write_weights(folder / file, {name: shapes[name] for name in names if weight_map[name] == file})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def shapes_of(spec: ModelSpec, *, without: Iterable[str] = ()) -> dict[str, tuple[int, ...]]:
    """The parameters of a model as the tensors of a file."""
    return {each.name: each.shape for each in spec.structure.parameters if each.name not in set(without)}
