"""The docs tell the truth: their code runs, their commands work, their tables list what there is."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.command import uneven_here
from tests.pages import REFERENCE, ROOT, blocks, pages_with, table_rows
from tests.weight_files import shapes_of, write_weights
from uneven.config import TrainConfig, load_config
from uneven.data import Fields, load_tokenizer
from uneven.data.records import read_records
from uneven.modelspec import read_model

CHECKPOINT = "docs/reference/checkpoint.md"
GOODPUT = "docs/reference/goodput.md"
HOSTS = "docs/howto/several-machines.md"
TIMEOUT_S = 180

FILE_NAME = re.compile(r"# ([\w.-]+)\n")
"""The first line of a block that the page's commands know as a file."""
OTHER_COMMANDS = re.compile(
    r"make (train|test|check)|scripts/(setup|check|test)( .*)?|pip install .*|"
    r"(uneven (launch|goodput|export|drain|join)|torchrun) .*"
)
"""What else a page may tell a reader to type; it runs in continuous integration or in a module of tests for it."""
SHORT = (
    *("train.steps=2", "train.seq_len=32", "eval.reload=false", "eval.sequences=2", "sample.tokens=0"),
    *("launch.threads=1", "checkpoint.every=0"),
)


def test_the_docs_have_examples_of_every_kind() -> None:
    """So that a change of the pattern above does not turn the tests below into tests of nothing."""
    assert len(pages_with("python")) >= 3
    assert len(pages_with("toml")) >= 2
    assert len(pages_with("sh")) >= 2


# Code


def is_howto(page: str) -> bool:
    """Whether the Python of a page uses what its commands have made."""
    return page.startswith("docs/howto/")


@pytest.mark.parametrize("page", [page for page in pages_with("python") if not is_howto(page)])
def test_python_blocks_run(tmp_path: Path, page: str) -> None:
    """All of a page in order, as one script: blocks may build on each other and may launch ranks."""
    run_script(page, tmp_path)


def run_script(page: str, folder: Path) -> None:
    script = folder / "page.py"
    script.write_text("\n\n".join(blocks(page, "python")))
    done = subprocess.run(
        [sys.executable, script.name], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", pages_with("toml"))
def test_toml_blocks_are_configurations(tmp_path: Path, page: str) -> None:
    for number, text in enumerate(blocks(page, "toml")):
        (tmp_path / f"{number}.toml").write_text(text)
        assert load_config(tmp_path / f"{number}.toml") != TrainConfig()


@pytest.mark.parametrize("page", pages_with("jsonl"))
def test_jsonl_blocks_are_records(tmp_path: Path, page: str) -> None:
    for number, text in enumerate(blocks(page, "jsonl")):
        (tmp_path / f"{number}.jsonl").write_text(text)
        assert len(list(read_records(tmp_path / f"{number}.jsonl", Fields()))) == 2


# Commands


def write_records(folder: Path) -> None:
    """Texts, conversations, and a template of few tokens for them."""
    texts = [{"text": f"line {n} of {n * n % 17}"} for n in range(200)]
    roles = [("user", "{n} + 1?"), ("assistant", "{n}, and 1")]
    chats = [{"messages": [{"role": role, "content": text.format(n=n)} for role, text in roles]} for n in range(200)]
    for name, records in (("texts", texts), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    turn = "{{ message.role[0] }}: {{ message.content }};"
    template = f"{{% for message in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}a: {{% endif %}}"
    (folder / "my-model" / "chat_template.jinja").write_text(template)


@dataclass(frozen=True)
class Reader:
    """Someone who types what a page says, in a folder that has what the page's files are called."""

    folder: Path

    @classmethod
    def prepare(cls, folder: Path, page: str, *, tiny_files: Path) -> "Reader":
        shutil.copytree(tiny_files / "model", folder / "my-model")
        shutil.copytree(tiny_files / "corpus", folder / "notes")
        load_tokenizer("byte").save(folder / "my-model")
        write_weights(folder / "my-model" / "model.safetensors", shapes_of(read_model(folder / "my-model")))
        (folder / "book.txt").write_text("Call me Ishmael. " * 50)
        write_records(folder)
        for text in blocks(page, "toml"):
            name = FILE_NAME.match(text)
            if name:
                (folder / name.group(1)).write_text(text)
        return cls(folder)

    def type(self, line: str, *, number: int, cache: Path) -> subprocess.CompletedProcess[str]:
        """Run an `uneven` command; training is shortened, and reads notes where the line does not say what."""
        _, command, *arguments = shlex.split(line, comments=True)
        if command == "train":
            says_data = any("data.paths" in part or part.endswith(".toml") for part in arguments)
            settings = [*SHORT, f"data.cache={cache}", *([] if says_data else ["data.paths=notes"])]
            arguments += [part for setting in settings for part in ("--set", setting)]
            if "--out" not in arguments:
                arguments += ["--out", f"run-{number}"]
        return uneven_here(command, *arguments, cwd=self.folder)


def commands(page: str) -> Iterator[str]:
    for body in blocks(page, "sh"):
        yield from (line.strip() for line in body.splitlines() if line.strip() and not line.startswith("#"))


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_work(tmp_path: Path, tiny_files: Path, page: str) -> None:
    reader = Reader.prepare(tmp_path, page, tiny_files=tiny_files)
    for number, line in enumerate(commands(page)):
        if line.startswith(("uneven train", "uneven plan ")):
            done = reader.type(line, number=number, cache=tiny_files / "cache")
            assert done.returncode == 0, f"{line}\n{done.stderr}"
        else:
            assert OTHER_COMMANDS.fullmatch(line), f"{page}: {line!r} is not run and not known"
    if is_howto(page) and blocks(page, "python"):
        run_script(page, tmp_path)
        shutil.rmtree(tmp_path / "runs")  # real models are large


# Reference


def test_the_reference_lists_every_flag() -> None:
    flags = set(re.findall(r"--[a-z-]+", uneven_here("train", "--help", cwd=ROOT).stdout)) - {"--help"}
    listed = {flag for row in table_rows(REFERENCE) for flag in re.findall(r"^`(--[a-z-]+)", row[0])}
    assert listed == flags


@pytest.mark.parametrize(("command", "page"), [("launch", HOSTS), ("goodput", GOODPUT), ("export", CHECKPOINT)])
def test_the_page_of_a_command_lists_every_flag(command: str, page: str) -> None:
    flags = set(re.findall(r"--[a-z-]+", uneven_here(command, "--help", cwd=ROOT).stdout)) - {"--help"}
    assert {re.match(r"`(--[a-z-]+)", row[0]).group(1) for row in table_rows(page) if row[0].startswith("`--")} == flags


@pytest.mark.parametrize("page", pages_with("bash"))
def test_scripts_are_scripts(page: str) -> None:
    for script in blocks(page, "bash"):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_the_reference_lists_what_a_run_writes(tmp_path: Path, tiny_files: Path) -> None:
    reader = Reader.prepare(tmp_path, REFERENCE, tiny_files=tiny_files)
    line = "uneven train --replicas 1 --set log.samples=true --out run"
    assert reader.type(line, number=0, cache=tiny_files / "cache").returncode == 0
    run = tmp_path / "run"
    listed = {name for row in table_rows(REFERENCE) for name in re.findall(r"`([\w.-]+)/?[^`]*`", row[0])}
    written = {path.name for path in run.iterdir()}
    for name in ("summary.json", "data.json"):
        written |= json.loads((run / name).read_text()).keys()
    written |= json.loads((run / "metrics.jsonl").read_text().splitlines()[0]).keys()
    assert written <= listed
