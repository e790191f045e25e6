"""The faults of public code for nonuniform tensor parallelism, put into our code: the parity check catches each.

Their numbers are those of NVIDIA's `nonuniform_tp.py` (Megatron-LM, `dev`, head of 2026-08-21), in the order in
which they were found by running it on the CPU. Every test also shows that the same plan passes without the fault.
"""

from unittest.mock import patch

import pytest

from tests import layouts, models
from tests.ranks import mutations, parity, test_steps
from tests.ranks.parity import Deviation
from tests.ranks.pool import RankPool
from uneven.errors import LayoutError
from uneven.layout import ParallelPlan, Partition, ReplicaPlan, apportion, partition

VISIBLE = 1e-3
"""A fault's relative error is nowhere near rounding."""


def plan_of(name: str, shares: list[list[float]], **options) -> ParallelPlan:
    return ParallelPlan.from_shares(models.model_spec(name).structure, shares, **options)


def with_fault(pool: RankPool, mutation: mutations.Mutation, *, name: str, plan: ParallelPlan) -> Deviation:
    """How far a job with a fault is from the truth, after having shown that without it the job is exact."""
    parity.assert_parity(pool, name, plan)
    needed = parity.truth(name)
    case = mutations.mutated_gradients
    results = pool.run(case, mutation, name, plan, needed.rows, num_ranks=len(plan.devices))
    return parity.deviation(results, plan, needed)


def wrong_parameters(found: Deviation) -> set[str]:
    """The last parts of the names of the parameters whose gradient is visibly wrong on some device."""
    return {name.removesuffix(".weight").rpartition(".")[2] for _, name in found.wrong(VISIBLE)}


@pytest.mark.parametrize("world", ["4+3", "2+1"])
def test_row_parallel_weights_paired_in_another_order_are_caught(pool: RankPool, world: str) -> None:
    """Fault 1: row-parallel weights paired in different element order on the two sides of the all-reduce."""
    plan = plan_of("llama", layouts.WORLDS[world])
    found = with_fault(pool, mutations.row_parallel_weights_in_another_order, name="llama", plan=plan)
    assert found.loss <= parity.TOLERANCE
    assert found.worst_gradient > VISIBLE
    assert wrong_parameters(found) == {"o_proj", "down_proj"}


def test_gate_and_up_cut_as_one_run_of_rows_are_caught(pool: RankPool) -> None:
    """Fault 2: SwiGLU, `[gate; up]` cut as one run of rows."""
    plan = plan_of("llama", layouts.WORLDS["4+3"])
    found = with_fault(pool, mutations.gate_and_up_cut_as_one_run, name="llama", plan=plan)
    assert found.loss > VISIBLE
    assert {"gate_proj", "up_proj", "down_proj"} <= wrong_parameters(found)


def test_a_shared_kv_heads_gradient_from_one_holder_is_caught(pool: RankPool) -> None:
    """Fault 3: grouped-query attention when a group of heads that share a key-value head is cut."""
    plan = plan_of("qwen2-14q-2kv", layouts.WORLDS["4+3"])
    found = with_fault(pool, mutations.one_holder_counts_for_a_shared_kv_head, name="qwen2-14q-2kv", plan=plan)
    assert found.loss <= parity.TOLERANCE
    assert wrong_parameters(found) >= {"k_proj", "v_proj"}
    assert {name.rpartition(".")[0].rpartition(".")[2] for _, name in found.wrong(VISIBLE)} == {"k_proj", "v_proj"}


def test_queries_dealt_evenly_to_kv_heads_are_caught(pool: RankPool) -> None:
    """Fault 3 in the forward pass: a device holds 1 query head of one key-value head and 3 of the next."""
    plan = plan_of("qwen2-14q-2kv", [[6, 4, 2, 2], [1, 1]])
    assert [plan.layout_of(1).partitions["model.layers.0.self_attn"].intervals(1)] == [((6, 10),)]
    found = with_fault(pool, mutations.as_many_queries_for_each_kv_head, name="qwen2-14q-2kv", plan=plan)
    assert found.loss > VISIBLE


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_replicated_parameters_without_a_peer_are_caught(pool: RankPool, name: str) -> None:
    """Fault 4: norms and other replicated parameters on ranks without a peer are never reduced."""
    plan = plan_of(name, layouts.WORLDS["4+3"])
    found = with_fault(pool, mutations.replicated_parameters_summed_with_peers_only, name=name, plan=plan)
    assert found.loss <= parity.TOLERANCE
    wrong = found.wrong(VISIBLE)
    assert all("norm" in parameter for _, parameter in wrong)
    assert (3, "model.norm.weight") in wrong
    assert (0, "model.norm.weight") not in wrong


def test_weights_not_permuted_to_the_layouts_order_are_caught(pool: RankPool) -> None:
    """Fault 5: weights not permuted to the order that the pairing needs. The loss can't show it."""
    plan = layouts.special_plan(models.model_spec("llama").structure, "interleaved")
    found = with_fault(pool, mutations.weights_not_permuted, name="llama", plan=plan)
    assert found.loss <= parity.TOLERANCE
    assert found.worst_gradient > VISIBLE
    assert wrong_parameters(found) == {"gate_proj", "up_proj", "down_proj"}


def test_parts_of_extra_ranks_left_unreduced_are_caught(pool: RankPool) -> None:
    """Fault 6: some ranks are left with unreduced parts."""
    plan = plan_of("llama", layouts.WORLDS["4+3"])
    found = with_fault(pool, mutations.extra_ranks_parts_left_unreduced, name="llama", plan=plan)
    assert found.loss <= parity.TOLERANCE
    wrong = found.wrong(VISIBLE)
    assert (3, "model.layers.0.mlp.gate_proj.weight") in wrong
    assert (0, "model.layers.0.mlp.gate_proj.weight") not in wrong


def test_weights_stepped_by_unreduced_parts_are_caught(pool: RankPool) -> None:
    """Fault 6 after two steps of the optimizer: replicas hold unlike weights, and neither holds the right ones."""
    course = test_steps.Course("llama", num_steps=2)
    plan = test_steps.plan_of(course, "4+3")
    needed = test_steps.train_alone(course)
    sound = pool.run(test_steps.train, course, plan, num_ranks=7)
    assert max(test_steps.errors_of_weights(sound, plan, needed).values()) <= test_steps.WEIGHTS_TOLERANCE
    case, mutation = mutations.mutated_training, mutations.extra_ranks_parts_left_unreduced
    errors = test_steps.errors_of_weights(pool.run(case, mutation, course, plan, num_ranks=7), plan, needed)
    last_rows = "model.layers.0.mlp.gate_proj.weight"
    assert errors[3, last_rows] > VISIBLE
    assert errors[6, last_rows] > VISIBLE


def plan_with_dead_slot(name: str) -> ParallelPlan:
    """Devices 0, 1, 3 and 4, 5: the third device of the first replica is gone."""
    structure = models.model_spec(name).structure
    new_id = {0: 0, 1: 1, 2: 3, 3: 4, 4: 5}
    replicas = []
    for replica in plan_of(name, [[1, 1, 1], [1, 1]]).replicas:
        partitions = {
            module: Partition(tuple(new_id[owner] for owner in each.owners))
            for module, each in replica.layout.partitions.items()
        }
        devices = tuple(new_id[device] for device in replica.layout.devices)
        replicas.append(ReplicaPlan(type(replica.layout)(structure, devices, partitions), replica.batch_share))
    return ParallelPlan(tuple(replicas))


def test_a_group_over_a_dead_slot_is_refused_at_once(pool: RankPool) -> None:
    """Fault 7: a dead slot that is not the last; groups that wait for ever."""
    plan = plan_with_dead_slot("llama")
    parity.assert_parity(pool, "llama", plan)
    case, mutation = mutations.mutated_error, mutations.groups_over_dead_slots
    results = pool.run(case, mutation, "llama", plan, parity.truth("llama").rows, num_ranks=6)
    assert results[2] is None
    for device in plan.devices:
        message, seconds = results[device]
        assert "[2] are not in this job" in message
        assert seconds < mutations.SHORT_TIMEOUT_S


def test_a_group_of_which_a_member_never_comes_ends_in_an_error(pool: RankPool) -> None:
    """Fault 7 again, where the dead slot is a device of the job."""
    results = pool.run(mutations.group_with_an_absent_member, 1, num_ranks=3)
    assert results[1] is None
    for message, seconds in (results[0], results[2]):
        assert "timed out" in message.lower() or "timeout" in message.lower(), message
        assert seconds < 10 * mutations.SHORT_TIMEOUT_S


def test_a_mean_over_replicas_is_caught(pool: RankPool) -> None:
    """Fault 8: mean over replicas instead of over tokens; unlike batches count wrongly."""
    plan = plan_of("llama", layouts.WORLDS["4+3"], batch_shares=[5, 2])
    found = with_fault(pool, mutations.mean_over_replicas, name="llama", plan=plan)
    assert found.loss > VISIBLE
    assert found.worst_gradient > VISIBLE


def test_a_plan_that_drops_remainder_heads_is_refused() -> None:
    """Fault 9: heads not divisible. A layout in which some head belongs to nobody can't be written down."""

    def floor(total: int, weights: list[float]) -> list[int]:
        if total != 14:
            return apportion(total, weights)
        return [int(total * weight // sum(weights)) for weight in weights]

    with (
        patch.object(partition, "apportion", floor),
        pytest.raises(LayoutError, match=r"self_attn: the partition has 12 units, its axis 'heads' 14"),
    ):
        plan_of("qwen2-14q-2kv", [[1, 1, 1, 1]])


def test_remainder_heads_dropped_in_silence_are_caught(pool: RankPool) -> None:
    """Fault 9: heads not divisible. Silently uneven splits, below what a layout checks."""
    plan = plan_of("qwen2-14q-2kv", layouts.WORLDS["4+3"])
    parity.assert_parity(pool, "qwen2-14q-2kv", plan)
    needed = parity.truth("qwen2-14q-2kv")
    case, mutation = mutations.mutated_loss, mutations.remainder_heads_dropped
    losses = pool.run(case, mutation, "qwen2-14q-2kv", plan, needed.rows, num_ranks=7)
    assert len(set(losses)) == 1
    assert abs(losses[0] - needed.loss) > VISIBLE * needed.loss
