"""Twenty optimizer steps of a divided job follow one process: clipping, accumulation, warm-up, unlike batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from tests import models, oracle
from tests.ranks import parity
from tests.ranks.parity import Rows
from tests.ranks.pool import RankPool
from uneven.comm import World
from uneven.layout import MAX_GROUPS_PER_DEVICE, Copies, ParallelPlan, Replicate, Shard, StateShard
from uneven.modelspec import ModelSpec
from uneven.optim import PURPOSE, AdamW, Schedule, ShardedOptimizer
from uneven.sync import GradReducer

WEIGHTS_TOLERANCE = 1e-10
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
SCHEDULE = Schedule(peak=0.02, floor=0.002, warmup_steps=4, total_steps=20)
WORLDS: dict[str, list[list[float]]] = {
    "4+3": [[1, 1, 1, 1], [1, 1, 1]],
    "3+2+1": [[1, 1, 1], [1, 1], [1]],
    "2+1+1+1": [[1, 1], [1], [1], [1]],
    "2+1": [[1, 1], [1]],
    "1": [[1]],
}


@dataclass(frozen=True, slots=True)
class Course:
    """A short training: of batches of 5, 6 and 7 sequences in turn, in micro-batches of at most two."""

    model: str
    dtype: torch.dtype = torch.float64
    num_steps: int = 20
    max_norm: float = 0.5
    micro_batch: int = 2
    copies: Copies = 2
    max_groups: int = MAX_GROUPS_PER_DEVICE

    @property
    def spec(self) -> ModelSpec:
        """One layer and a small vocabulary, for the sake of the clock."""
        return models.model_spec(self.model, num_hidden_layers=1, vocab_size=251)

    def rows(self, step: int) -> Rows:
        return models.token_batch(self.spec, 5 + step % 3, seed=step)

    def micro_batches(self, rows: Rows) -> Iterator[Rows]:
        for first in range(0, len(rows), self.micro_batch):
            yield rows[first : first + self.micro_batch]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss and gradient norm of each step, the weights after the last one, and the types that were at work."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Rows]
    grad_dtypes: frozenset[torch.dtype] = frozenset()
    optimizer: "OptimizerFacts | None" = None


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """What a rank's optimizer kept and moved: its state by shard and kind, and the bytes of parameters it exchanged."""

    steps: dict[StateShard, int]
    states: dict[StateShard, dict[str, Rows]]
    num_bytes: int
    sent_bytes: int
    received_bytes: int

    @classmethod
    def of(cls, optimizer: ShardedOptimizer, world: World) -> "OptimizerFacts":
        states = {state.shard: {kind: flat.numpy() for kind, flat in state.kinds.items()} for state in optimizer.states}
        steps = {state.shard: state.step for state in optimizer.states}
        sent, received = world.traffic.sent_bytes(PURPOSE), world.traffic.received_bytes(PURPOSE)
        return cls(steps, states, sum(state.num_bytes for state in optimizer.states), int(sent), received)


def as_arrays(model: nn.Module) -> dict[str, Rows]:
    """Weights by name, bf16 ones as fp32."""
    return {
        name: (p.float() if p.dtype == torch.bfloat16 else p).detach().numpy().copy()
        for name, p in model.named_parameters()
    }


def train(world: World, course: Course, plan: ParallelPlan) -> Outcome:
    """One rank of a training."""
    model = parity.divided_model(course.spec, plan, world=world, dtype=course.dtype)
    reducer = GradReducer(model, plan, world=world, bucket_bytes=parity.SMALL_BUCKETS, max_groups=course.max_groups)
    rule = AdamW(betas=BETAS, weight_decay=WEIGHT_DECAY)
    optimizer = ShardedOptimizer(model, plan, world=world, rule=rule, copies=course.copies)
    losses, norms, dtypes = [], [], set()
    for step in range(1, course.num_steps + 1):
        rows = course.rows(step)
        mine = list(course.micro_batches(parity.own_rows(plan, rows, device=world.device)))
        reducer.begin(len(mine))
        total = torch.zeros((), dtype=torch.float64)
        for micro_batch in mine:
            loss = oracle.call(model, micro_batch, num_tokens=rows[:, 1:].size)
            loss.backward()
            total += loss.detach()
        grads = reducer.finish()
        norms.append(grads.norm())
        grads.clip(course.max_norm, norm=norms[-1])
        dtypes |= {grad.dtype for grad in grads.by_name().values()}
        optimizer.step(grads.tiles, lr=SCHEDULE.learning_rate(step))
        losses.append(parity.global_loss(world, plan, total))
    return Outcome(losses, norms, as_arrays(model), frozenset(dtypes), OptimizerFacts.of(optimizer, world))


@cache
def train_alone(course: Course) -> Outcome:
    """The stock model with torch's optimizer on the whole batch in one process."""
    model = oracle.stock_model(course.spec, seed=parity.SEED, dtype=course.dtype)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS)
    losses, norms = [], []
    for step in range(1, course.num_steps + 1):
        rows = course.rows(step)
        optimizer.zero_grad()
        loss = oracle.call(model, rows, num_tokens=rows[:, 1:].size)
        loss.backward()
        losses.append(float(loss.detach()))
        grads = [p.grad for p in parameters]
        norms.append(float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))))
        if norms[-1] > course.max_norm:
            for grad in grads:
                grad.mul_(course.max_norm / norms[-1])
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.learning_rate(step)
        optimizer.step()
    return Outcome(losses, norms, as_arrays(model))


def plan_of(course: Course, world: str) -> ParallelPlan:
    return ParallelPlan.from_shares(course.spec.structure, WORLDS[world])


def errors_of_weights(outcomes: list[Outcome], plan: ParallelPlan, needed: Outcome) -> dict[tuple[int, str], float]:
    """Relative errors of each parameter on each device."""
    found = {}
    for device, outcome in enumerate(outcomes):
        for name, weight in needed.weights.items():
            whole = torch.from_numpy(weight)
            part = oracle.local_part(plan, name, whole, device=device)
            found[device, name] = oracle.relative_error(torch.from_numpy(outcome.weights[name]), part, scale=whole)
    return found


@pytest.mark.parametrize("world", ["4+3", "3+2+1"])
@pytest.mark.parametrize("name", ["qwen3", "llama-bias-tied-pad"])
def test_twenty_steps_equal_one_process(trained, name: str, world: str) -> None:
    course = Course(name)
    outcomes, needed = trained(course, world), train_alone(course)
    assert all(norm > course.max_norm for norm in needed.norms), "clipping must have bound in every step"
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.losses, needed.losses, rtol=WEIGHTS_TOLERANCE)
        np.testing.assert_allclose(outcome.norms, needed.norms, rtol=WEIGHTS_TOLERANCE)
        assert outcome.grad_dtypes == {torch.float64}
    errors = errors_of_weights(outcomes, plan_of(course, world), needed)
    assert max(errors.values()) <= WEIGHTS_TOLERANCE, max(errors, key=errors.__getitem__)


def test_replicas_take_unlike_numbers_of_micro_batches() -> None:
    """What the test above rests on: 4+3 runs unlike numbers of backward passes, which change from step to step."""
    course = Course("qwen3")
    plan = plan_of(course, "4+3")
    counts = set()
    for step in range(1, 4):
        rows = course.rows(step)
        own = [parity.own_rows(plan, rows, device=device) for device in (0, 4)]
        assert sum(map(len, own)) == len(rows)
        counts.add(tuple(len(list(course.micro_batches(each))) for each in own))
    assert counts == {(2, 1), (2, 2)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["qwen3", "llama-bias-tied-pad"])
def test_replicated_parameters_stay_the_same_bits_on_all_ranks(trained, name: str, dtype: torch.dtype) -> None:
    course = Course(name, dtype)
    outcomes = trained(course, "4+3")
    structure = course.spec.structure
    replicated = [spec.name for spec in structure.parameters if isinstance(spec.placement, Replicate)]
    kinds = {part for each in replicated for part in each.split(".")[-2:]}
    assert kinds >= ({"q_norm", "k_norm", "norm"} if name == "qwen3" else {"bias", "o_proj", "down_proj"})
    first = outcomes[0]
    for outcome in outcomes[1:]:
        assert outcome.losses == first.losses
        assert outcome.norms == first.norms
        for each in replicated:
            assert np.array_equal(outcome.weights[each], first.weights[each]), each


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_holders_of_the_same_element_keep_the_same_bits(trained, dtype: torch.dtype) -> None:
    """Each element of a divided parameter is the same in every replica, and on every holder of a shared head."""
    course = Course("qwen3", dtype)
    outcomes, plan = trained(course, "4+3"), plan_of(course, "4+3")
    for spec in plan.structure.parameters:
        if not isinstance(spec.placement, Shard):
            continue
        whole = np.full(spec.shape, np.nan, outcomes[0].weights[spec.name].dtype)
        rows = np.moveaxis(whole, spec.placement.dim, 0)
        for device in plan.devices:
            local = np.moveaxis(outcomes[device].weights[spec.name], spec.placement.dim, 0)
            ranges = plan.layout_of(device).spec_ranges(spec, device) or ()
            held = np.concatenate([np.arange(*each) for each in ranges])
            known = ~np.isnan(rows[held])
            assert np.array_equal(rows[held][known], local[known]), f"{spec.name} on device {device}"
            rows[held] = local
        assert not np.isnan(whole).any()


def test_the_same_seed_and_layout_give_the_same_bits(pool: RankPool, trained) -> None:
    course = Course("qwen3", torch.float32)
    plan = plan_of(course, "4+3")
    again = pool.run(train, course, plan, num_ranks=len(plan.devices))
    for first, second in zip(trained(course, "4+3"), again, strict=True):
        assert first.losses == second.losses
        assert first.norms == second.norms
        for name, weight in first.weights.items():
            assert np.array_equal(weight, second.weights[name]), name


def assembled(outcomes: list[Outcome], plan: ParallelPlan) -> torch.Tensor:
    """All weights of the first replica as one vector, in an order that no layout changes."""
    layout, parts = plan.replicas[0].layout, []
    for spec in plan.structure.parameters:
        whole = np.zeros(spec.shape)
        for device in layout.devices:
            ranges = layout.spec_ranges(spec, device)
            index = slice(None) if ranges is None else np.concatenate([np.arange(*each) for each in ranges])
            dim = spec.placement.dim if isinstance(spec.placement, Shard) else 0
            np.moveaxis(whole, dim, 0)[index] = np.moveaxis(outcomes[device].weights[spec.name], dim, 0)
        parts.append(torch.from_numpy(whole).flatten())
    return torch.cat(parts)


def test_bf16_follows_one_device_and_reduces_in_fp32(trained) -> None:
    """Activations in bf16 keep 8 bits, and Adam magnifies small gradients: weights agree to a tenth of their way."""
    course, start = Course("llama", torch.bfloat16), Course("llama", torch.bfloat16, num_steps=0)
    divided, alone, before = trained(course, "2+1"), trained(course, "1"), trained(start, "1")
    for outcome in divided:
        assert outcome.grad_dtypes == {torch.float32}
        assert outcome.losses == divided[0].losses
        np.testing.assert_allclose(outcome.losses, alone[0].losses, rtol=0.01)
    weights, needed, origin = (
        assembled(outcomes, plan_of(course, world))
        for outcomes, world in ((divided, "2+1"), (alone, "1"), (before, "1"))
    )
    way = (needed - origin).norm()
    assert way > 0.1 * origin.norm()
    assert (weights - needed).norm() < 0.1 * way


@pytest.mark.parametrize("world", ["2+1", "4+3"])
def test_a_replica_without_samples_is_exact(pool: RankPool, world: str) -> None:
    """One sequence in the global batch: the second replica has no backward pass and adds zeros."""
    plan = ParallelPlan.from_shares(models.model_spec("qwen3").structure, WORLDS[world])
    assert plan.samples(1) == [1, 0]
    parity.assert_parity(pool, "qwen3", plan, batch=1)
