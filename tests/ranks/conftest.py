"""The pool of ranks that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.ranks.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(9)
    yield ranks
    ranks.close()
