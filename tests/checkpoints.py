"""Checkpoints made without torch: manifests whose files have the right size and say nothing."""

from pathlib import Path
from typing import Any

from tests.models import model_spec
from uneven.checkpoint.folder import make_draft, part_file, publish
from uneven.checkpoint.manifest import STATE, Manifest, Part, Slice, Stored
from uneven.layout import ModelStructure
from uneven.modelspec import ModelSpec

FILE_BYTES = 1 << 16
SMALL = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}


def small_spec(**overrides: Any) -> ModelSpec:
    return model_spec("llama", **SMALL | overrides)


def halves_of(structure: ModelStructure) -> list[Slice]:
    """Every parameter and kind in two slices."""
    found = []
    for spec in structure.parameters:
        size = spec.shape[spec.dim]
        for kind in STATE:
            found += [Slice(spec.name, kind, 0, size // 2), Slice(spec.name, kind, size // 2, size)]
    return found


def part_of(file: str, slices: list[Slice]) -> Part:
    """A file with these slices in fp32, which has another content."""
    return Part(file, FILE_BYTES, tuple(Stored(each, "F32", 64, "0" * 8) for each in slices))


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
