"""Applies the rules of `repo_rules` to this repository, and each rule to a small source that breaks it."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit import repo_rules as rules
from tests.unit.repo_rules import Source

ROOT = Path(__file__).resolve().parents[2]
PLACES_WITH_NAMES = ("src", "tests", "scripts", "docs", "benchmarks", "examples")
PLACES_WITH_TEXT = (
    "README.md",
    "CHANGELOG.md",
    "Makefile",
    "pyproject.toml",
    "requirements.lock",
    "requirements-demo.lock",
    ".ci",
)
GENERATED = ("__pycache__", ".egg-info")


def files(*places: str) -> Iterator[Path]:
    """The files below some places of the repository that exist, without what tools generate."""
    for place in places:
        path = ROOT / place
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for each in found:
            if each.is_file() and not any(part.endswith(GENERATED) for part in each.parts):
                yield each


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def sources(root: str) -> tuple[Source, ...]:
    found = tuple(Source.parse(relative(path), path.read_text()) for path in files(root) if path.suffix == ".py")
    assert found, f"no Python files below {ROOT / root}: this check would check nothing"
    return found


def text_of(path: Path) -> str:
    """The text of a file; "" for a picture or another binary."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def cases(table: dict) -> list[tuple]:
    return [(check, *case) for check, group in table.items() for case in group]


def fail_on(violations: Iterable[str]) -> None:
    found = list(violations)
    if found:
        pytest.fail("\n".join([f"{len(found)} places break a rule:", *found]), pytrace=False)


def modules_without_torch() -> list[str]:
    """Dotted names of all existing modules of values and decisions."""
    light = {name for names in rules.LAYERS[: rules.DECISIONS + 1] for name in names}
    paths = [Path(source.path).relative_to("src") for source in sources("src") if source.layer in light]
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]


IMPORT_AND_LOOK = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
    loaded = [heavy for heavy in ("torch", "transformers") if heavy in sys.modules]
    if loaded:
        sys.exit(f"importing {name} loads {loaded}")
"""


def import_in_fresh_interpreter(modules: list[str], *, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", IMPORT_AND_LOOK, ",".join(modules)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


# The repository


@pytest.mark.parametrize("check", rules.CHECKS_OF_ALL + rules.CHECKS_OF_SRC)
def test_src_keeps_the_rule(check):
    fail_on(violation for source in sources("src") for violation in check(source))


@pytest.mark.parametrize("check", rules.CHECKS_OF_ALL)
def test_tests_keep_the_rule(check):
    fail_on(violation for source in sources("tests") for violation in check(source))


def test_src_is_within_its_line_budget():
    fail_on(rules.check_line_budget({each.path: len(each.text.splitlines()) for each in sources("src")}))


def test_files_and_folders_are_named_by_a_concept():
    fail_on(violation for path in files(*PLACES_WITH_NAMES) for violation in rules.check_path_names(relative(path)))


def test_values_and_decisions_load_no_torch():
    modules = modules_without_torch()
    assert "uneven.errors" in modules
    done = import_in_fresh_interpreter(modules, folder=ROOT / "src")
    assert done.returncode == 0, done.stderr


def test_mypy_exempts_only_layers_that_use_torch():
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    exempt = {name for each in overrides if each.get("ignore_errors") for name in each["module"]}
    upper = {name for names in rules.LAYERS[rules.MECHANISMS :] for name in names} - {"data"}
    assert exempt == {f"uneven.{name}.*" for name in upper}


def test_links_in_the_docs_lead_somewhere():
    pages = [path for path in files("README.md", "CHANGELOG.md", "docs") if path.suffix == ".md"]
    assert pages, "no Markdown pages: this check would check nothing"
    fail_on(violation for page in pages for violation in rules.check_links(page, ROOT))


def test_nothing_outside_tests_mentions_a_place_on_one_machine():
    places = [place for place in PLACES_WITH_NAMES if place != "tests"]
    fail_on(
        violation
        for path in files(*PLACES_WITH_TEXT, *places)
        for violation in rules.check_no_foreign_places(relative(path), text_of(path))
    )


# The rules themselves: a check that cannot fail is a defect

ONE_LINE = "x = 1\n"
BAD = {
    rules.check_file_length: (("layout/a.py", ONE_LINE * 401, "401: the file has 401 lines; at most 400"),),
    rules.check_function_length: (
        ("layout/a.py", "def f():\n" + " x = 1\n" * 60, "1: f has 61 lines"),
        ("layout/a.py", "class A:\n async def f():\n" + "  x = 1\n" * 60, "2: f has 61"),
    ),
    rules.check_parameters: (
        ("layout/a.py", "def f(a, b, *, c, d, e, f, g): ...", "1: f has 7 parameters"),
        ("layout/a.py", "def f(a, b, c): ...", "1: f takes 3 parameters by position"),
        ("layout/a.py", "class A:\n def f(self, a, b, c): ...", "2: f takes 3"),
        ("layout/a.py", "class A:\n @staticmethod\n def f(a, b, c): ...", "3: f takes 3"),
        ("layout/a.py", "class A:\n def __init__(self, a, b, c): ...", "2: __init__ takes 3"),
        ("layout/a.py", "def g():\n def f(a, b, c): ...", "2: f takes 3"),
        ("cli/a.py", "def f(a, b, c): ...", "1: f takes 3"),
    ),
    rules.check_no_global: (("layout/a.py", "def f():\n global x, y", "2: global x, y"),),
    rules.check_no_bare_except: (("layout/a.py", "try:\n x\nexcept:\n y", "3: a bare except"),),
    rules.check_zip_is_strict: (("layout/a.py", "for a in zip(b, c): ...", "1: zip without strict="),),
    rules.check_annotated: (
        ("layout/a.py", "def f(a, *, b: int, **c): ...", "1: f has no annotation for a, c, return"),
        ("layout/a.py", "class A:\n def f(self, a) -> int: ...", "2: f has no annotation for a"),
        ("layout/a.py", "class A:\n def __init__(self): ...", "2: __init__ has no annotation"),
    ),
    rules.check_environment_in_one_place: (
        ("launch/a.py", "import os\nos.environ['A']", "2: os.environ;"),
        ("launch/a.py", "def f(): return os.getenv('A')", "1: os.getenv;"),
        ("launch/a.py", "from os import environ", "1: os.environ;"),
    ),
    rules.check_no_mutable_state: (
        ("layout/a.py", "A = []", "1: A is module-level mutable state (List)"),
        ("layout/a.py", "A: dict[str, int] = {}", "1: A is module-level mutable"),
        ("layout/a.py", "A = {x for x in B}", "(SetComp)"),
        ("layout/a.py", "A = defaultdict(list)", "(defaultdict)"),
        ("layout/a.py", "A = collections.deque()", "(deque)"),
        ("layout/a.py", "A = (1, [2])", "(List)"),
        ("layout/a.py", "A = MappingProxyType({1: []})", "(List)"),
        ("layout/a.py", "if x:\n A = {}", "2: A is"),
        ("layout/a.py", "__all__ = ['a']\n__all__ += []\nB = []", "3: B is"),
    ),
    rules.check_nothing_done_at_import: (
        ("layout/a.py", "A = build()", "1: build(...) runs at import"),
        ("layout/a.py", "A = frozenset(build())", "1: build(...) runs"),
        ("layout/a.py", "if x:\n torch.manual_seed(0)", "2: torch.manual_seed"),
        ("layout/a.py", "class A: ...\na = A()", "2: A(...) runs"),
        ("layout/a.py", "app.command()(f)", "1: app.command(...) runs"),
        ("layout/a.py", "from rich import Console\na = Console()", "2: Console"),
    ),
    rules.check_layer_is_known: (("novel/a.py", "", "1: 'novel' stands in no layer"),),
    rules.check_layers: (
        ("layout/a.py", "from uneven.train import x", "1: layout imports uneven.train.x; L0 may not"),
        ("layout/a.py", "def f():\n import uneven.comm", "2: layout imports uneven.comm"),
        ("layout/a.py", "if TYPE_CHECKING:\n from ..cli import x", "2: layout imports uneven.cli.x"),
        ("layout/a.py", "importlib.import_module('uneven.sim')", "1: layout imports uneven.sim"),
        ("errors.py", "from uneven import layout", "1: errors imports uneven.layout; inside L0"),
        ("config/a.py", "from uneven.modelspec import x", "inside L0 config may import ['errors', "),
        ("draw/a.py", "from uneven.planner import x", "inside L1 draw may import nothing"),
        ("planner/a.py", "from uneven.sim import x", "inside L1 planner may import ['costmodel']"),
        ("sync/a.py", "from uneven.planner import x", "mechanisms never import decisions"),
        ("comm/a.py", "from uneven.reshard import x", "inside L2 comm may import nothing"),
        ("parallel/a.py", "from uneven.sync import x", "inside L2 parallel may import ['comm']"),
        ("launch/a.py", "from uneven.elastic import x", "inside L3 launch may import nothing"),
        ("train/a.py", "from uneven.serve import x", "inside L4 train may import nothing"),
        ("train/a.py", "from uneven import Partition", "name the layer's module"),
    ),
    rules.check_light_layers: (
        ("layout/a.py", "def f():\n import torch.nn as nn", "2: layout imports torch.nn"),
        ("draw/a.py", "from torch import nn", "1: draw imports torch.nn"),
        ("sim.py", "from transformers import x", "1: sim imports transformers.x"),
    ),
    rules.check_distributed_only_in_comm: (
        ("sync/a.py", "import torch.distributed as dist", "1: sync imports"),
        ("train/a.py", "from torch import distributed", "1: train imports"),
        ("sync/a.py", "from torch.distributed import x", "1: sync imports"),
        ("sync/a.py", "import torch\ntorch.distributed.barrier()", "2: sync uses"),
        ("sync/a.py", "import torch as t\nt.distributed.x", "2: sync uses"),
    ),
}

GOOD = {
    rules.check_file_length: (("layout/a.py", ONE_LINE * 400),),
    rules.check_function_length: (("layout/a.py", "def f():\n" + " x = 1\n" * 59),),
    rules.check_parameters: (
        ("layout/a.py", "class A:\n def f(self, a, b, *args, c, d, e, f, **rest): ..."),
        ("layout/a.py", "class A:\n def __exit__(self, kind, error, trace): ..."),
        ("parallel/a.py", "class A:\n @staticmethod\n def forward(ctx, a, b, c): ..."),
        ("cli/a.py", "@app.command('x')\ndef f(a, b, c, d, e, f, g, h): ..."),
        ("parallel/a.py", "def attend(a, b, c, d, e, *, f, g, h): ..."),
        ("parallel/a.py", "def hook(module, args, kwargs): ..."),
    ),
    rules.check_zip_is_strict: (("layout/a.py", "zip(a, b, strict=True)"),),
    rules.check_annotated: (("layout/a.py", "class A:\n def f(self, a: int) -> None: g(lambda x: x)"),),
    rules.check_environment_in_one_place: (("launch/environment.py", "import os\nos.environ['A']"),),
    rules.check_no_mutable_state: (
        ("layout/a.py", "__all__ = ['a']\nA = frozenset({1})\ndef f():\n x = []"),
        ("layout/a.py", "A = MappingProxyType({'a': (1, 2)})"),
    ),
    rules.check_nothing_done_at_import: (
        ("layout/a.py", "A = re.compile('x')\ndef f(): return g()"),
        ("layout/a.py", "@dataclass(frozen=True)\nclass A: ...\na = A()"),
        ("layout/a.py", "from uneven.layout import Axis\na = Axis()"),
        ("layout/a.py", "if __name__ == '__main__':\n main()"),
        ("cli/a.py", "app = typer.Typer()\napp.command('x')(f)"),
    ),
    rules.check_layer_is_known: (("__init__.py", ""),),
    rules.check_layers: (
        ("__init__.py", "from uneven.train import train"),
        ("modelspec/a.py", "from ..errors import X\nfrom uneven.layout.axis import Y"),
        ("sync/a.py", "from uneven import comm, reshard\nfrom . import segments"),
        ("elastic/a.py", "import uneven.launch\nfrom uneven.planner import search"),
        ("cli/a.py", "from uneven import __version__, rl, train"),
    ),
    rules.check_light_layers: (
        ("comm/a.py", "import torch"),
        ("layout/a.py", "import json"),
    ),
    rules.check_distributed_only_in_comm: (
        ("comm/a.py", "import torch.distributed as dist"),
        ("sync/a.py", "import torch\nself.distributed = 1"),
    ),
}


@pytest.mark.parametrize(("check", "path", "text", "message"), cases(BAD))
def test_rule_catches(check, path, text, message):
    found = list(check(Source.parse(f"src/uneven/{path}", text)))
    assert len(found) == 1, found
    assert found[0].startswith(f"src/uneven/{path}:")
    assert message in found[0]


@pytest.mark.parametrize(("check", "path", "text"), cases(GOOD))
def test_rule_lets_pass(check, path, text):
    assert list(check(Source.parse(f"src/uneven/{path}", text))) == []


def test_every_rule_is_shown_to_fail():
    assert set(BAD) == {*rules.CHECKS_OF_ALL, *rules.CHECKS_OF_SRC}


def test_tests_may_be_longer_and_take_fixtures_by_position():
    text = ONE_LINE * 599 + "def test_a(one, two, three): ..."
    source = Source.parse("tests/unit/test_a.py", text)
    assert not [*rules.check_file_length(source), *rules.check_parameters(source)]


def test_line_budget_names_total_budget_and_largest_file():
    (found,) = rules.check_line_budget({"src/a.py": 30, "src/b.py": 71}, budget=100)
    assert found == "src has 101 lines; its budget is 100; src/b.py is the largest file"
    assert not list(rules.check_line_budget({"src/a.py": 30, "src/b.py": 70}, budget=100))


@pytest.mark.parametrize("path", ["src/uneven/utils.py", "src/uneven/base/a.py", "tests/unit/helpers/x.json"])
def test_name_without_a_concept_is_caught(path):
    (found,) = rules.check_path_names(path)
    assert "names no concept" in found
    assert not list(rules.check_path_names("src/uneven/layout/baseline.py"))


def test_module_that_loads_torch_is_caught(tmp_path):
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "light.py").write_text("import json")
    (tmp_path / "heavy.py").write_text("import light, torch")
    assert import_in_fresh_interpreter(["light"], folder=tmp_path).returncode == 0
    done = import_in_fresh_interpreter(["light", "heavy"], folder=tmp_path)
    assert done.returncode != 0
    assert "importing heavy loads ['torch']" in done.stderr


@pytest.mark.parametrize("text", ["cd /work/main", "see (../shared/x.md)", "in bash_jobs.0"])
def test_place_on_one_machine_is_caught(text):
    (found,) = rules.check_no_foreign_places("README.md", f"fine: network/work/a\n{text}\n")
    assert found.startswith("README.md:2: mentions")


def test_link_to_nothing_is_caught(tmp_path):
    (tmp_path / "b.md").write_text("# The head: one\n")
    page = tmp_path / "a.md"
    page.write_text(
        "[a](b.md) [b](b.md#the-head-one) [c](https://example.org/x) `[d](gone.md)`\n"
        "```\n[e](gone.md)\n```\n"
        '[f](gone.md)\n![g](gone.png "title")\n[h](b.md#gone)\n<img src="gone.svg">\n[i]: gone.txt\n'
        "[j](../outside)\n"
    )
    found = [violation.split(": ")[0] for violation in rules.check_links(page, tmp_path)]
    assert found == [f"a.md:{line}" for line in range(5, 11)]
