"""Write a divided model as a plain Hugging Face folder: whole tensors in safetensors files, and its configuration.

The leader of one replica gathers one parameter at a time and writes files of bounded size, so it never holds more
than one file's worth of the model.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from uneven.comm import World
from uneven.layout import ModelLayout, Transfer, transfers
from uneven.modelspec import ModelSpec
from uneven.reshard import Exchange, copy_common, tiles_of

PURPOSE = "export"
MAX_FILE_BYTES = 4 * 2**30


def export_model(
    model: PreTrainedModel,
    layout: ModelLayout,
    *,
    spec: ModelSpec,
    world: World,
    folder: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `config.json` and safetensors into `folder`, which exists on the leader's host and is empty.

    Called by all devices of the replica; its first device writes.
    """
    is_leader = world.device == layout.devices[0]
    writer = _Writer(folder, max_file_bytes)
    for name, whole in gather_parameters(model, layout, world=world):
        if is_leader:
            writer.add(name, whole)
    if is_leader:
        for name, buffer in saved_buffers(model):
            writer.add(name, buffer.cpu())
        writer.close()
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        config = {**spec.config, "architectures": [type(model).__name__], "dtype": dtype}
        config.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def saved_buffers(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What belongs to a model without being a parameter; every device holds it whole."""
    kept = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def gather_parameters(
    model: PreTrainedModel, layout: ModelLayout, *, world: World
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter whole, on the CPU, on the replica's first device; empty tensors elsewhere.

    Called by all devices of the replica, which consume it in step.
    """
    leader = layout.devices[0]
    structure = layout.structure
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    have = {
        device: {spec.name: layout.held(spec, device) for spec in structure.parameters} for device in layout.devices
    }
    moves: defaultdict[str, list[Transfer]] = defaultdict(list)
    for move in transfers(have, {leader: {s.name: s.whole for s in structure.parameters}}, structure=structure):
        moves[move.spec.name].append(move)
    group = world.group(layout.devices, purpose=PURPOSE)
    for spec in structure.parameters:
        local = parameters[spec.name].detach()
        whole = torch.empty(spec.shape if world.device == leader else 0, dtype=local.dtype)
        source = {spec.name: tiles_of(local, spec, ranges=have[world.device][spec.name])}
        target = {spec.name: tiles_of(whole, spec, ranges=spec.whole)} if world.device == leader else {}
        copy_common(source, target)
        if moves[spec.name]:  # on all ranks, or on none
            Exchange(moves[spec.name], source=source, target=target, group=group).run(dtype=local.dtype)
        yield spec.name, whole


class _Writer:
    """Safetensors files of at most `max_bytes` each (a larger tensor has one of its own), and their index."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = sum(t.numel() * t.element_size() for t in self._waiting.values())
        if self._waiting and size + tensor.numel() * tensor.element_size() > self._max_bytes:
            self._flush()
        self._waiting[name] = tensor

    def close(self) -> None:
        """Write what waits, name the files as transformers expects, and index them if they are several."""
        self._flush()
        total = len(self._files)
        if total == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._files):
            file = f"model-{index + 1:05d}-of-{total:05d}.safetensors"
            self._part(index).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        listing: dict[str, Any] = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2) + "\n")

    def _flush(self) -> None:
        part = self._part(len(self._files))
        save_file(self._waiting, part, metadata={"format": "pt"})
        part.chmod(0o644)  # safetensors writes for the owner alone
        self._num_bytes += sum(t.numel() * t.element_size() for t in self._waiting.values())
        self._files.append(list(self._waiting))
        self._waiting = {}

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"
