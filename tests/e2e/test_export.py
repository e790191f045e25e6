"""`uneven export`: a checkpoint of a job on several devices, as a folder that plain transformers loads."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.checkpoints import manifest_of, save, small_spec
from tests.e2e.command import load, uneven_here
from tests.job_state import save_stock
from uneven.data import load_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints of the steps 7, which is whole, and 9, whose contents are damaged."""
    folder = tmp_path_factory.mktemp("run")
    save_stock(folder, "llama-bias-tied-pad", torch.bfloat16, world="2+1")
    save(folder, manifest_of(small_spec().structure, step=9))
    load_tokenizer("byte").save(folder / "tokenizer")
    return folder


def test_a_checkpoint_becomes_a_folder_of_transformers(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in ("new/folder", "empty"):
        done = uneven_here("export", str(run), "--to", out, "--step", "7", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert re.fullmatch(rf"{out}: step 7 of {run}, llama, [\d,]+ parameters in bfloat16\n", done.stdout)
        model = load(tmp_path / out)
        assert model.dtype == torch.bfloat16
        assert model.lm_head.weight is model.model.embed_tokens.weight
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / out)
        assert tokenizer.decode(tokenizer("as it was")["input_ids"]) == "as it was"
        config = json.loads((tmp_path / out / "config.json").read_text())
        assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "new"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none", "--to", "out"], "none/checkpoints: no checkpoint can be used: there is none"),
        (["empty", "--to", "out"], "empty/checkpoints: no checkpoint can be used: there is none"),
        (["RUN", "--to", "full"], "--to full: exists already; give a folder that is new or empty"),
        (["RUN", "--to", "full/file"], "--to full/file: exists already"),
        (["RUN", "--to", "out", "--step", "8"], "no checkpoint of step 8 can be used: there is step-0+7, step-0+9"),
        (
            ["RUN", "--to", "out"],
            r"step-00000009/rank-[01]\.safetensors: is damaged: bytes [\d,]+ to [\d,]+, in [\w.]+ \(",
        ),
        (["RUN", "--to", "full/file/out", "--step", "7"], "full/file/out: can't make this folder: Not a directory"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_no_folder(
    run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    done = uneven_here("export", *(str(run) if part == "RUN" else part for part in arguments), cwd=tmp_path)
    assert re.search(rf"^error: .*{message}.*\n$", done.stderr)
    assert done.stdout == ""
    assert done.returncode == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]
