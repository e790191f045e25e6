"""Loss and every gradient of every layout equal one process with the stock model, in float64 at 1e-12."""

import pytest

from tests import layouts, models
from tests.ranks.parity import assert_parity
from tests.ranks.pool import RankPool
from uneven.layout import ParallelPlan, groups_of


@pytest.mark.parametrize("world", layouts.WORLDS)
@pytest.mark.parametrize("name", models.MODELS)
def test_loss_and_gradients_equal_one_process(pool: RankPool, name: str, world: str) -> None:
    plan = ParallelPlan.from_shares(models.model_spec(name).structure, layouts.WORLDS[world])
    assert_parity(pool, name, plan)


@pytest.mark.parametrize("special", layouts.SPECIAL)
@pytest.mark.parametrize("name", models.MODELS)
def test_unusual_partitions_equal_one_process(pool: RankPool, name: str, special: str) -> None:
    assert_parity(pool, name, layouts.special_plan(models.model_spec(name).structure, special))


@pytest.mark.parametrize("max_groups", [1, 2, 3])
@pytest.mark.parametrize("world", ["4+3", "3+2+1 unequal"])
@pytest.mark.parametrize("name", ["qwen2-14q-2kv", "llama"])
def test_merged_groups_sum_the_same_gradients(pool: RankPool, name: str, world: str, max_groups: int) -> None:
    plan = ParallelPlan.from_shares(models.model_spec(name).structure, layouts.WORLDS[world])
    groups = groups_of(plan, max_groups=max_groups)
    assert any(group != members for members, group in groups.items()), "nothing was merged"
    assert_parity(pool, name, plan, max_groups=max_groups)
