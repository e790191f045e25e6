"""Rows as the arguments that any causal transformers model takes."""

from typing import Any

import torch

from uneven.data import Rows


def model_inputs(rows: Rows, *, device: torch.device) -> dict[str, Any]:
    """Inputs and targets on `device`. Positions are given only where they are not 0, 1, 2, ..., since a model that is
    given them may need a mask, and attention is slower with one."""
    targets = torch.from_numpy(rows.targets).to(device)
    inputs = {"input_ids": torch.from_numpy(rows.inputs).to(device), "labels": targets, "shift_labels": targets}
    positions = rows.position_ids
    if positions is not None:
        inputs["position_ids"] = torch.from_numpy(positions).to(device)
    return {**inputs, "use_cache": False}
