"""Loss and every gradient of every layout equal one process with the stock model, in float64 at 1e-12."""

from collections.abc import Callable, Iterator

import pytest

from tests import layouts, models
from tests.ranks.families_page import write_page
from tests.ranks.parity import Deviation, Variant, assert_parity
from tests.ranks.pool import RankPool
from uneven.layout import ParallelPlan, groups_of
from uneven.modelspec.families import BY_PLAN

BY_PLAN_LAYOUTS = ("3+2+1 unequal", "no heads on the first")
RECOMPUTED = ("llama", "gemma2", "olmo2", "mixtral", "deepseek-v3", "gpt-oss")

Record = Callable[[str, str, Deviation], None]


@pytest.fixture(scope="module")
def record() -> Iterator[Record]:
    """Takes the errors of each model and layout; when all have been run, the page of families is written."""
    found: dict[str, dict[str, Deviation]] = {}

    def take(name: str, layout: str, errors: Deviation) -> None:
        found.setdefault(name, {})[layout] = errors

    yield take
    write_page(found)


def plan_of(name: str, layout: str) -> ParallelPlan:
    structure = models.model_spec(name).structure
    if layout in layouts.SPECIAL:
        return layouts.special_plan(structure, layout)
    return ParallelPlan.from_shares(structure, layouts.WORLDS[layout])


@pytest.mark.parametrize("layout", [*layouts.WORLDS, *layouts.SPECIAL])
@pytest.mark.parametrize("name", models.MODELS)
def test_loss_and_gradients_equal_one_process(pool: RankPool, record: Record, name: str, layout: str) -> None:
    record(name, layout, assert_parity(pool, name, plan_of(name, layout)))


@pytest.mark.parametrize("layout", BY_PLAN_LAYOUTS)
@pytest.mark.parametrize("name", BY_PLAN)
def test_families_by_plan_equal_one_process(pool: RankPool, record: Record, name: str, layout: str) -> None:
    record(name, layout, assert_parity(pool, name, plan_of(name, layout)))


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputing_activations_changes_nothing(pool: RankPool, name: str) -> None:
    assert_parity(pool, name, plan_of(name, "3+2+1 unequal"), variant=Variant(recompute=True))


@pytest.mark.parametrize("max_groups", [1, 2, 3])
@pytest.mark.parametrize("world", ["4+3", "3+2+1 unequal"])
@pytest.mark.parametrize("name", ["qwen2-14q-2kv", "llama"])
def test_merged_groups_sum_the_same_gradients(pool: RankPool, name: str, world: str, max_groups: int) -> None:
    plan = plan_of(name, world)
    groups = groups_of(plan, max_groups=max_groups)
    assert any(group != members for members, group in groups.items()), "nothing was merged"
    assert_parity(pool, name, plan, variant=Variant(max_groups=max_groups))
