"""Checkpoints made without torch: manifests whose files have the right size and say nothing."""

from pathlib import Path
from typing import Any

from tests.models import model_spec
from uneven.checkpoint.folder import make_draft, part_file, publish
from uneven.checkpoint.manifest import BLOCK_BYTES, CHECKSUM_DIGITS, Manifest, Part, Stored
from uneven.checkpoint.slices import STATE, Slice, matrix_shape
from uneven.layout import ModelStructure
from uneven.modelspec import ModelSpec

ITEM_BYTES = 4
SMALL = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}


def small_spec(**overrides: Any) -> ModelSpec:
    return model_spec("llama", **SMALL | overrides)


def halves_of(structure: ModelStructure) -> list[Slice]:
    """Every parameter and kind in two slices, cut between columns."""
    found = []
    for spec in structure.parameters:
        rows, columns = matrix_shape(spec)
        for kind in STATE:
            found.append(Slice(spec.name, kind, (0, rows), (0, columns // 2)))
            found.append(Slice(spec.name, kind, (0, rows), (columns // 2, columns)))
    return found


def part_of(file: str, slices: list[Slice]) -> Part:
    """A file with these slices in fp32, one after another."""
    stored, end = [], 64
    for each in slices:
        size = ITEM_BYTES * each.num_elements
        stored.append(Stored(each, "F32", end, "0" * CHECKSUM_DIGITS * -(-size // BLOCK_BYTES)))
        end += size
    return Part(file, end, tuple(stored))


def manifest_of(
    structure: ModelStructure, *, step: int = 60, slices: list[Slice] | None = None, **facts: Any
) -> Manifest:
    """A job's manifest with two files that take turns."""
    chosen = halves_of(structure) if slices is None else slices
    values: dict[str, Any] = {
        "num_updates": step,
        "tokens": 1000 * step,
        "time_s": 100.0 * step,
        "seed": 3,
        "dtype": "float32",
        "config": {"model_type": structure.family},
        "parts": tuple(part_of(f"rank-{device}.safetensors", chosen[device::2]) for device in (0, 1)),
        "buffers": {},
        "extra": {"data": {"sample": 7 * step}},
    }
    return Manifest(step=step, structure=structure, **values | facts)


def save(run: Path, manifest: Manifest, *, tag: str = "t") -> Path:
    """Publish a manifest with files of the sizes that it says."""
    draft = make_draft(run, manifest.step, tag=tag)
    for device, part in enumerate(manifest.parts):
        with part_file(draft, device).open("xb") as stream:
            stream.truncate(part.num_bytes)
    return publish(draft, manifest)
