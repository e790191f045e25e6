"""A tiny job for the command line: a model's folder and a corpus, in a folder of the test's own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import TinyJob, write_tiny_files


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_files(folder)
    yield folder
    shutil.rmtree(folder / "cache", ignore_errors=True)  # it may hold converted models


@pytest.fixture
def tiny(tiny_files: Path, tmp_path: Path) -> TinyJob:
    return TinyJob(tiny_files, tmp_path)
