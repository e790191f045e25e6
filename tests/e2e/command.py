"""Run the command line as a user does: in a process of its own, or, to load torch only once, in this one."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from uneven.cli.main import main

TIMEOUT_S = 180

TINY_MODEL = {
    "model_type": "llama",
    "hidden_size": 40,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "eos_token_id": 256,
    "bos_token_id": None,
}


def write_tiny_files(folder: Path) -> None:
    """A model's folder with a configuration, and a corpus, for `TinyJob`."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(TINY_MODEL))
    (folder / "corpus").mkdir()
    for index in range(40):
        words = " ".join(f"line {index * 31 + n} of {n * n % 17}" for n in range(60))
        (folder / "corpus" / f"{index}.txt").write_text(words)


def uneven(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`uneven ARGUMENTS` in `cwd`, with its output; never waits for ever."""
    command = [str(Path(sys.executable).parent / "uneven"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)


def uneven_here(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As `uneven`, in this process; the ranks are processes of their own all the same."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    argv, sys.argv = sys.argv, ["uneven", *arguments]
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = argv
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def load(folder: Path) -> PreTrainedModel:
    """A saved model by plain transformers."""
    return AutoModelForCausalLM.from_pretrained(folder)


@dataclass(frozen=True)
class TinyJob:
    """Arguments of a job of a second or two, and its results."""

    files: Path
    folder: Path

    def settings(self, **overrides: Any) -> list[str]:
        """`--set` arguments; keys with "__" for the dot."""
        values: dict[str, Any] = {
            "model": str(self.files / "model"),
            "data__paths": [str(self.files / "corpus")],
            "data__cache": str(self.files / "cache"),
            "train__steps": 4,
            "train__seq_len": 32,
            "train__global_batch": 7,
            "train__micro_batch": 3,
            "eval__sequences": 8,
            "eval__reload": False,
            "sample__tokens": 0,
        }
        values |= overrides
        return [part for key, value in values.items() for part in ("--set", f"{key.replace('__', '.')}={_toml(value)}")]

    def train(self, *arguments: str, out: str = "run", **overrides: Any) -> subprocess.CompletedProcess[str]:
        """`uneven train` into `out`, with other settings where given."""
        return uneven_here("train", *arguments, "--out", out, *self.settings(**overrides), cwd=self.folder)

    def metrics(self, out: str = "run") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / out / "metrics.jsonl").read_text().splitlines()]

    def events(self, out: str = "run") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / out / "events.jsonl").read_text().splitlines()]

    def devices(self, out: str = "run") -> list[dict[str, Any]]:
        devices: list[dict[str, Any]] = json.loads((self.folder / out / "devices.json").read_text())
        return devices

    def summary(self, out: str = "run") -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / out / "summary.json").read_text())
        return summary


def _toml(value: Any) -> str:
    return json.dumps(value)
