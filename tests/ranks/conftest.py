"""What all tests of this folder share: a pool of ranks, and the trainings that were run in it."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.ranks import test_steps
from tests.ranks.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(9)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def trained(pool: RankPool) -> Callable[[test_steps.Course, str], list[test_steps.Outcome]]:
    """The outcomes of a course in a world of test_steps.WORLDS by device, each run once."""

    @cache
    def run(course: test_steps.Course, world: str) -> list[test_steps.Outcome]:
        plan = test_steps.plan_of(course, world)
        return pool.run(test_steps.train, course, plan, num_ranks=len(plan.devices))

    return run
