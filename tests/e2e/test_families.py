"""Mixtures of experts, recomputed activations and families by plan, from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.e2e.command import TinyJob, load
from uneven.layout import read_plan

MIXTURE: dict[str, Any] = {
    **models.MODELS["mixtral"],
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
PLANNED: dict[str, Any] = {
    "model_type": "smollm3",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_model(folder: Path, config: dict[str, Any]) -> str:
    file = folder / f"{config['model_type']}.json"
    file.write_text(json.dumps(config))
    return str(file)


def train(tiny: TinyJob, *arguments: str, out: str, model: str, **overrides: Any) -> list[float]:
    settings = {"model": model, "train__precision": "fp64", "train__seq_len": 16, "train__steps": 3} | overrides
    result = tiny.train(*arguments, out=out, **settings)
    assert result.returncode == 0, result.stderr
    return [line["loss"] for line in tiny.metrics(out)]


def test_a_mixture_follows_one_device_by_width_and_whole_with_micro_batches(tiny: TinyJob) -> None:
    """The balance loss is over the global batch, however that is cut; the weights come out for transformers."""
    model = write_model(tiny.folder, MIXTURE)
    alone = train(tiny, "--replicas", "1", out="alone", model=model, train__micro_batch=9)
    by_width = train(tiny, "--replicas", "2,1", out="width", model=model, train__micro_batch=2)
    whole = train(tiny, "--replicas", "2,1", out="whole", model=model, parallel__experts="whole", eval__reload=True)
    summary = tiny.summary("whole")
    assert summary["check_problem"] is None
    assert summary["reloaded_heldout_loss"] == pytest.approx(summary["heldout_loss"], rel=1e-6)
    assert by_width == pytest.approx(alone, rel=1e-12)
    assert whole == pytest.approx(alone, rel=1e-12)
    assert {axis.name for axis in read_plan(tiny.folder / "whole" / "plan.json").structure.axes.values()} == {
        "vocab",
        "heads",
        "experts",
    }
    again = train(tiny, "--plan", "whole/plan.json", out="again", model=model)
    assert again == whole
    saved, needed = load(tiny.folder / "whole" / "model"), load(tiny.folder / "alone" / "model")
    for (name, found), (_, expected) in zip(saved.named_parameters(), needed.named_parameters(), strict=True):
        assert found.shape == expected.shape
        assert float((found - expected).detach().abs().max()) < 1e-6, name


def test_a_family_by_its_plan_trains_and_recomputes(tiny: TinyJob) -> None:
    model = write_model(tiny.folder, PLANNED)
    alone = train(tiny, "--replicas", "1", out="alone", model=model)
    divided = train(tiny, "--replicas", "2,1", out="divided", model=model, train__recompute=True)
    assert divided == pytest.approx(alone, rel=1e-12)
    assert load(tiny.folder / "divided" / "model").config.model_type == "smollm3"
