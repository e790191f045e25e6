"""The optimizer's state divided over replicas: as exact as one process, in the bytes that the division promises."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import oracle
from tests.ranks import parity, test_steps
from tests.ranks.pool import RankPool
from tests.ranks.test_steps import WEIGHTS_TOLERANCE, Course
from uneven.comm import World
from uneven.errors import ModelError, PlanError
from uneven.layout import (
    Copies,
    ModelLayout,
    ModelStructure,
    ParallelPlan,
    ParameterSpec,
    ReplicaPlan,
    Replicate,
    Shard,
    shards_of,
)
from uneven.optim import PURPOSE, AdamW, ShardedOptimizer
from uneven.reshard import Tiles, flat_tiles, tiles_of
from uneven.sync import GradReducer

COPIES: tuple[Copies, ...] = (1, 2, "all")
TRAINED = ("4+3", "3+2+1", "2+1+1+1")
BUILT: dict[str, list[list[float]]] = {
    "2+2": [[1, 1], [1, 1]],
    "2+2+2": [[1, 1], [1, 1], [1, 1]],
    "2+2+2+2": [[1, 1], [1, 1], [1, 1], [1, 1]],
    "5+4": [[1] * 5, [1] * 4],
    "3+2+1": [[1, 1, 1], [1, 1], [1]],
    "2+2+1+1": [[1, 1], [1, 1], [1], [1]],
}
NAME = "qwen3"
"""Per-head norms, and two key-value heads that three or four devices share."""


def built_plan(world: str) -> ParallelPlan:
    return ParallelPlan.from_shares(Course(NAME).spec.structure, BUILT[world])


def bundles_by_element(plan: ParallelPlan) -> Counter[tuple[int, ...]]:
    """Elements of the model by the devices that hold them, found by asking every device about every element."""
    found: Counter[tuple[int, ...]] = Counter()
    for spec in plan.structure.parameters:
        if not isinstance(spec.placement, Shard):
            found[tuple(sorted(plan.devices))] += spec.num_elements
            continue
        rows: list[set[int]] = [set() for _ in range(spec.shape[spec.placement.dim])]
        for device in plan.devices:
            for start, stop in plan.layout_of(device).spec_ranges(spec, device) or ():
                for row in range(start, stop):
                    rows[row].add(device)
        for holders in rows:
            found[tuple(sorted(holders))] += spec.num_elements // len(rows)
    return found


def kept_elements(plan: ParallelPlan, copies: Copies, *, device: int) -> int:
    """Of how many elements a device keeps the state."""
    return sum(shard.num_elements for shard in shards_of(plan, copies) if device in shard.holders)


def held_elements(plan: ParallelPlan, *, device: int) -> int:
    return sum(size for members, size in bundles_by_element(plan).items() if device in members)


# Exactness


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("world", TRAINED)
def test_twenty_steps_equal_one_process_whoever_keeps_the_state(trained, world: str, copies: Copies) -> None:
    course = Course(NAME, copies=copies)
    outcomes, needed = trained(course, world), test_steps.train_alone(Course(NAME))
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.losses, needed.losses, rtol=WEIGHTS_TOLERANCE)
        np.testing.assert_allclose(outcome.norms, needed.norms, rtol=WEIGHTS_TOLERANCE)
    errors = test_steps.errors_of_weights(outcomes, test_steps.plan_of(course, world), needed)
    assert max(errors.values()) <= WEIGHTS_TOLERANCE, max(errors, key=errors.__getitem__)


@pytest.mark.parametrize("world", TRAINED)
def test_the_number_of_copies_changes_no_bit(trained, world: str) -> None:
    one, *others = (trained(Course(NAME, copies=copies), world) for copies in COPIES)
    for other in others:
        for first, second in zip(one, other, strict=True):
            assert first.losses == second.losses
            assert all(np.array_equal(first.weights[name], second.weights[name]) for name in first.weights)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("world", TRAINED)
def test_all_who_keep_a_shard_have_the_same_bits_at_the_same_step(trained, world: str, copies: Copies) -> None:
    course = Course(NAME, copies=copies)
    seen: dict[Any, dict[str, parity.Rows]] = {}
    num_comparisons = 0
    for outcome in trained(course, world):
        assert set(outcome.optimizer.steps.values()) == {course.num_steps}
        for shard, state in outcome.optimizer.states.items():
            assert state.keys() == {"exp_avg", "exp_avg_sq"}
            first = seen.setdefault(shard, state)
            num_comparisons += first is not state
            assert all(np.array_equal(first[kind], state[kind]) for kind in state)
    assert num_comparisons == sum(len(shard.holders) - 1 for shard in seen)
    assert all(np.abs(state["exp_avg"]).max() > 0 for state in seen.values())


@pytest.mark.parametrize("max_groups", [1, 3])
def test_twenty_steps_equal_one_process_with_merged_groups(trained, max_groups: int) -> None:
    """Whoever merely adds zeros to a sum keeps no state and receives no parameters."""
    course = Course(NAME, copies=1, max_groups=max_groups)
    outcomes, needed = trained(course, "3+2+1"), test_steps.train_alone(Course(NAME))
    plan = test_steps.plan_of(course, "3+2+1")
    assert max(test_steps.errors_of_weights(outcomes, plan, needed).values()) <= WEIGHTS_TOLERANCE
    for device, outcome in enumerate(outcomes):
        np.testing.assert_allclose(outcome.norms, needed.norms, rtol=WEIGHTS_TOLERANCE)
        assert outcome.optimizer.num_bytes == kept_elements(plan, 1, device=device) * 16


# Bytes


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("world", TRAINED)
def test_each_device_receives_what_it_holds_but_does_not_keep(trained, world: str, copies: Copies) -> None:
    course = Course(NAME, copies=copies)
    plan = test_steps.plan_of(course, world)
    facts = [outcome.optimizer for outcome in trained(course, world)]
    for device in plan.devices:
        lacking = held_elements(plan, device=device) - kept_elements(plan, copies, device=device)
        assert facts[device].received_bytes == lacking * 8 * course.num_steps
        assert facts[device].num_bytes == kept_elements(plan, copies, device=device) * 16
    assert sum(each.sent_bytes for each in facts) == sum(each.received_bytes for each in facts)
    if copies == "all" or (copies == 2 and world == "4+3"):
        assert not any(each.sent_bytes for each in facts)


def build(world: World, plan: ParallelPlan, dtype: torch.dtype, copies: Copies) -> tuple[int, int, int]:
    """Bytes of a rank's optimizer state, and what it sends and receives in one step of zeros."""
    model = parity.divided_model(Course(NAME).spec, plan, world=world, dtype=dtype)
    reducer = GradReducer(model, plan, world=world, bucket_bytes=parity.SMALL_BUCKETS)
    optimizer = ShardedOptimizer(model, plan, world=world, copies=copies)
    reducer.begin(0)
    optimizer.step(reducer.finish().tiles, lr=0.1)
    num_bytes = sum(state.num_bytes for state in optimizer.states)
    return num_bytes, int(world.traffic.sent_bytes(PURPOSE)), world.traffic.received_bytes(PURPOSE)


@pytest.mark.parametrize(("dtype", "state_bytes"), [(torch.float32, 8), (torch.bfloat16, 12)])
@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("world", BUILT)
def test_state_and_gather_take_the_bytes_of_their_shards(
    pool: RankPool, world: str, copies: Copies, dtype: torch.dtype, state_bytes: int
) -> None:
    """Two moments in fp32, and fp32 masters of bf16 weights; parameters travel in their own precision."""
    plan = built_plan(world)
    results = pool.run(build, plan, dtype, copies, num_ranks=len(plan.devices))
    kept = [kept_elements(plan, copies, device=device) for device in plan.devices]
    assert [num_bytes for num_bytes, _, _ in results] == [elements * state_bytes for elements in kept]
    for device, (_, _, received) in enumerate(results):
        assert received == (held_elements(plan, device=device) - kept[device]) * dtype.itemsize
    assert sum(sent for _, sent, _ in results) == sum(received for _, _, received in results)


@pytest.mark.parametrize("world", ["2+2+2", "2+2+2+2"])
def test_devices_send_as_much_as_they_receive(pool: RankPool, world: str) -> None:
    """But for rounding to whole slices, where every replica has one device for each part."""
    plan = built_plan(world)
    slices = sum(spec.num_elements // spec.shape[spec.dim] for spec in plan.structure.parameters)
    for copies in (1, 2):
        for _, sent, received in pool.run(build, plan, torch.float32, copies, num_ranks=len(plan.devices)):
            assert received > 0
            assert abs(sent - received) <= 4 * slices * len(plan.replicas)


# The rule, on one device


def alone(model: nn.Module) -> tuple[ParallelPlan, World]:
    """A plan by which one device holds a module of any kind, and its world."""
    parameters = tuple(
        ParameterSpec(name, tuple(p.shape), Replicate(), "normal") for name, p in model.named_parameters()
    )
    layout = ModelLayout(ModelStructure("any", {}, parameters), (0,), {})
    return ParallelPlan((ReplicaPlan(layout, 1),)), oracle.lone_world()


def whole_tiles(plan: ParallelPlan, tensors: dict[str, torch.Tensor]) -> Tiles:
    specs = {spec.name: spec for spec in plan.structure.parameters}
    return {name: tiles_of(tensor, specs[name], ranges=specs[name].whole) for name, tensor in tensors.items()}


def test_masters_of_bf16_weights_are_fp32() -> None:
    """Updates of a tenth of a bf16 step add up. In bf16 alone each of them would be rounded away."""
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    plan, world = alone(model)
    optimizer = ShardedOptimizer(model, plan, world=world, rule=AdamW(weight_decay=0.0))
    bf16_step = 2.0**-8
    for _ in range(20):
        optimizer.step(whole_tiles(plan, {"weight": torch.ones(4, 4)}), lr=bf16_step / 10)
    assert torch.equal(model.weight, torch.full((4, 4), 1 - 2 * bf16_step, dtype=torch.bfloat16))


def test_norms_and_biases_do_not_decay() -> None:
    """With a gradient of zero a step is its weight decay alone."""
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.RMSNorm(3, dtype=torch.float64))
    before: dict[str, Any] = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan, world = alone(model)
    optimizer = ShardedOptimizer(model, plan, world=world, rule=AdamW(weight_decay=0.5))
    optimizer.step(whole_tiles(plan, {name: torch.zeros_like(p) for name, p in before.items()}), lr=0.1)
    for name, parameter in model.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name], rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_has_the_bits_of_torchs_adamw_wherever_a_bundle_is_cut(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(37, 23), nn.Linear(23, 5)).to(dtype) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    groups = [
        {"params": [p for p in reference.parameters() if (p.ndim >= 2) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    needed = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    plan, world = alone(model)
    optimizer = ShardedOptimizer(model, plan, world=world)
    for _ in range(5):
        for parameter in reference.parameters():
            parameter.grad = torch.randn_like(parameter)
        # In the order of a bundle, the reverse one, and in two buffers, so that runs are joined and not joined.
        gradients = {}
        for layer in (1, 0):
            names = (f"{layer}.bias", f"{layer}.weight")
            buffer = torch.cat([reference.get_parameter(name).grad.flatten() for name in names])
            entries = tuple((plan.structure.parameter(name), plan.structure.parameter(name).whole) for name in names)
            gradients |= flat_tiles(buffer, entries)
        optimizer.step(gradients, lr=0.01)
        needed.step()
        for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(found, wanted)


def test_parameters_of_two_precisions_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16))
    plan, world = alone(model)
    with pytest.raises(ModelError, match=r"one dtype, found torch\.float32 \(0\..*\), torch\.bfloat16 \(1\."):
        ShardedOptimizer(model, plan, world=world)


@pytest.mark.parametrize("copies", [0, "two"])
def test_copies_are_a_number_or_all(copies: Any) -> None:
    model = nn.Linear(2, 2)
    plan, world = alone(model)
    with pytest.raises(PlanError, match=f"at least 1 or 'all', found {copies!r}"):
        ShardedOptimizer(model, plan, world=world, copies=copies)
