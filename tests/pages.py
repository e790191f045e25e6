"""The pages of the docs and what stands on them: blocks of code, prose, rows of tables."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))
REFERENCE = "docs/reference/train.md"

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language, in order."""
    return [body for found, body in BLOCK.findall((ROOT / page).read_text()) if found == language]


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if blocks(page, language)]


def prose(page: str) -> str:
    return BLOCK.sub("", (ROOT / page).read_text())


def table_rows(page: str) -> list[list[str]]:
    """The cells of every table row of a page."""
    lines = [line for line in prose(page).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
