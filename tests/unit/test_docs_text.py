"""What of the docs can be checked by reading: their lists are complete, their lines fit."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.pages import PAGES, REFERENCE, ROOT, blocks, prose, table_rows
from uneven.config import TrainConfig

MAX_COLUMNS = 110


def keys(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every configuration key with its default."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def as_written(default: object) -> str:
    return "none" if default is None else json.dumps(default, default=str)


def test_the_reference_lists_every_key_with_its_default() -> None:
    found = [(row[0], row[1]) for row in table_rows(REFERENCE) if len(row) == 3 and row[1].startswith("`")]
    assert found == [(f"`{key}`", f"`{as_written(default)}`") for key, default in keys(TrainConfig())]


def test_the_file_tree_of_the_readme_is_that_of_src() -> None:
    (tree,) = blocks("README.md", "text")
    folder, listed = "", set()
    for line in tree.splitlines()[1:]:
        indent, name = re.match(r"( +)(\S+)", line).groups()
        if len(indent) == 2:
            folder = name if name.endswith("/") else ""
        if not name.endswith("/"):
            listed.add(folder + name)
    package = ROOT / "src/uneven"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    assert listed == {name for name in files if not Path(name).name.startswith("__")}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_lines_fit(page: str) -> None:
    """Except where Markdown or its reader needs them whole: tables, and lines that are one link or picture."""
    for number, line in enumerate(prose(page).splitlines(), start=1):
        is_exempt = line.startswith(("|", "![")) or " " not in line.strip()
        assert is_exempt or len(line) <= MAX_COLUMNS, f"{page}, line {number} outside of code: {line}"
