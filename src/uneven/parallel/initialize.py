"""Random weights that are the same, bit for bit, for every layout.

Each block of rows of a parameter has a generator of its own, seeded by (seed, name, block), so a rank draws only the
blocks that hold its rows and never a whole parameter.
"""

import hashlib

import torch
from transformers import PreTrainedModel

from uneven.layout import ModelLayout, ParameterSpec, Shard
from uneven.modelspec import ModelSpec
from uneven.parallel.parallelize import take_ranges

ELEMENTS_PER_BLOCK = 1 << 20


def fill_random(model: PreTrainedModel, layout: ModelLayout, *, spec: ModelSpec, device: int, seed: int) -> None:
    """Fill a model divided by `parallelize` as transformers would: normal weights, norms of 1, biases of 0."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter_spec in layout.structure.parameters:
            target = parameters[parameter_spec.name]
            if parameter_spec.init == "normal":
                target.copy_(_normal(parameter_spec, layout, device=device, seed=seed).mul_(spec.init_std))
            else:
                target.fill_(1.0 if parameter_spec.init == "ones" else 0.0)
    if spec.pad_token_id is not None:
        _zero_padding_row(model, spec.pad_token_id)


def _normal(spec: ParameterSpec, layout: ModelLayout, *, device: int, seed: int) -> torch.Tensor:
    """This device's part of a standard normal parameter, fp32 on the CPU."""
    rows, *rest = spec.shape
    ranges = layout.spec_ranges(spec, device)
    if ranges is not None and isinstance(spec.placement, Shard) and spec.placement.dim == 0:
        wanted, columns = list(ranges), None
    else:
        wanted, columns = [(0, rows)], ranges
    width = max(1, torch.Size(rest).numel())
    block_rows = max(1, ELEMENTS_PER_BLOCK // width)
    local = torch.empty(layout.local_shape(spec, device))
    filled = 0
    for start, stop in wanted:
        for block in range(start // block_rows, -(-stop // block_rows)):
            first = block * block_rows
            drawn = _draw((min(block_rows, rows - first), *rest), seed=seed, name=spec.name, block=block)
            part = drawn[max(start - first, 0) : stop - first]
            local[filled : filled + len(part)] = part if columns is None else take_ranges(part, spec, ranges=columns)
            filled += len(part)
            del drawn, part  # before the next block is drawn
    return local


def _draw(shape: tuple[int, ...], *, seed: int, name: str, block: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(shape, generator=generator)


def _zero_padding_row(model: PreTrainedModel, pad_token_id: int) -> None:
    embedding = model.get_input_embeddings()
    row = embedding.rows.row(pad_token_id)
    if row is not None:
        with torch.no_grad():
            embedding.weight[row].zero_()
