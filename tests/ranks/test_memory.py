"""A rank's memory is its share of the job, in bytes of live tensors: parameters, gradients, optimizer state.

In a model whose parameters are nearly everything. What a step needs besides has its bounds here too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch

from tests import models, oracle
from tests.memory import LiveBytes
from tests.ranks import parity, test_optimizer
from tests.ranks.pool import RankPool
from uneven.checkpoint.load import load_model
from uneven.comm import World
from uneven.layout import MAX_GROUPS_PER_DEVICE, ParallelPlan, Shard
from uneven.modelspec import ModelSpec
from uneven.optim import ShardedOptimizer
from uneven.parallel import build_model, fill_random, parallelize
from uneven.parallel.initialize import ELEMENTS_PER_BLOCK
from uneven.sync import GradReducer

VOCAB, HIDDEN, HEAD_DIM = 2048, 256, 32
BUFFERS = 2 * VOCAB * 8 + 2 * HEAD_DIM // 2 * 4
"""The local row of each token id, for embedding and head; two tensors of rotary frequencies."""
ACTIVATIONS = 2**20
"""More than one sequence of 11 tokens takes."""
HANDSHAKES = 4 * (MAX_GROUPS_PER_DEVICE + 1)
"""Each new process group sums one number."""
COPIES = 2
ROUNDING = 4096
"""Shards are equal but for an element each, and so is what a device sends and receives."""
WORLDS: dict[str, list[list[float]]] = {
    "1": [[1]],
    "2": [[1, 1]],
    "4": [[1, 1, 1, 1]],
    "2:1:1+2+1": [[2, 1, 1], [1, 1], [1]],
}


def model_spec() -> ModelSpec:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 1024, "vocab_size": VOCAB, "head_dim": HEAD_DIM}
    return models.model_spec("llama", num_attention_heads=8, num_key_value_heads=4, **sizes)


def plan_of(world: str) -> ParallelPlan:
    shares = WORLDS[world]
    return ParallelPlan.from_shares(model_spec().structure, shares, batch_shares=[1] * len(shares))


@dataclass(frozen=True, slots=True)
class Case:
    plan: ParallelPlan
    dtype: torch.dtype
    source: Path | None
    """A folder with the weights; random ones without."""

    def shares(self, device: int) -> dict[str, int]:
        """The bytes that a device must have after each stage."""
        held = self.plan.layout_of(device).local_elements(device)
        kept = test_optimizer.kept_elements(self.plan, COPIES, device=device)
        parameters = held * self.dtype.itemsize + BUFFERS
        gradients = parameters + held * 4
        state = gradients + kept * (8 if self.dtype == torch.float32 else 12)
        return {
            **dict.fromkeys(("built", "filled"), parameters),
            "reducer": gradients,
            **dict.fromkeys(("optimizer", "backward", "step"), state),
        }

    def largest(self, device: int) -> int:
        """Elements of the largest part of a parameter that a device holds."""
        layout = self.plan.layout_of(device)
        return max(prod(layout.local_shape(spec, device)) for spec in self.plan.structure.parameters)


def job(world: World, case: Case) -> dict[str, tuple[int, int]]:
    """For each stage of one rank, with one step of training: bytes of live tensors after it, and the most during it."""
    counter, found, needed = LiveBytes(), {}, case.shares(world.device)
    spec, plan, layout = model_spec(), case.plan, case.plan.layout_of(world.device)

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        with counter.stage():
            yield
            found[name] = (counter.settle(needed[name]), counter.peak)

    with stage("built"):
        model = parallelize(build_model(spec, dtype=case.dtype), layout, world=world)
    with stage("filled"):
        if case.source is None:
            fill_random(model, layout, spec=spec, device=world.device, seed=parity.SEED)
        else:
            load_model(model, layout, folder=case.source, device=world.device)
    with stage("reducer"):
        reducer = GradReducer(model, plan, world=world)
    with stage("optimizer"):
        optimizer = ShardedOptimizer(model, plan, world=world, copies=COPIES)
    with stage("backward"):
        rows = models.token_batch(spec, len(plan.replicas))
        mine = parity.own_rows(plan, rows, device=world.device)
        reducer.begin()
        oracle.call(model, mine, num_tokens=rows[:, 1:].size).backward()
        gradients = reducer.finish()
    with stage("step"):
        optimizer.step(gradients.tiles, lr=0.1)
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[torch.dtype, Path]:
    """Folders with the model, written by stock transformers."""
    folders = {}
    for dtype in (torch.float32, torch.bfloat16):
        folders[dtype] = tmp_path_factory.mktemp("source")
        oracle.stock_model(model_spec(), seed=3, dtype=dtype).save_pretrained(folders[dtype])
    return folders


def filling_bytes(case: Case, device: int) -> int:
    """What filling one parameter takes besides it: from a file a copy of its slice; random, an fp32 one and a block."""
    layout, most = case.plan.layout_of(device), 0
    for spec in case.plan.structure.parameters:
        local = prod(layout.local_shape(spec, device))
        if case.source is not None:
            most = max(most, local * case.dtype.itemsize)
        elif len(spec.shape) == 2:
            rows, width = spec.shape
            block = min(rows, ELEMENTS_PER_BLOCK // width) * width
            is_row_parallel = isinstance(spec.placement, Shard) and spec.placement.dim == 1
            most = max(most, 4 * (local + block + is_row_parallel * local))
    return most


def step_bytes(case: Case, device: int) -> int:
    """What an update takes: values, where there are no masters, and one temporary; or an exchange, out and in."""
    held = case.plan.layout_of(device).local_elements(device)
    kept = test_optimizer.kept_elements(case.plan, COPIES, device=device)
    return max(kept * (8 if case.dtype == torch.float32 else 4), 2 * (held - kept) * case.dtype.itemsize + ROUNDING)


@pytest.mark.parametrize(
    ("dtype", "is_loaded"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)]
)
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_has_its_share_of_everything_and_no_more(
    pool: RankPool, sources, world: str, dtype: torch.dtype, is_loaded: bool
) -> None:
    case = Case(plan_of(world), dtype, sources[dtype] if is_loaded else None)
    for device, found in enumerate(pool.run(job, case, num_ranks=len(case.plan.devices))):
        needed = case.shares(device)
        assert {name: live for name, (live, _) in found.items()} == needed
        excess = {name: peak - needed[name] for name, (_, peak) in found.items()}
        slice_bytes = case.largest(device) * dtype.itemsize
        assert excess["built"] <= VOCAB * 8
        assert filling_bytes(case, device) // 2 < excess["filled"] <= filling_bytes(case, device)
        assert excess["reducer"] <= HANDSHAKES
        assert excess["optimizer"] <= slice_bytes + HANDSHAKES
        assert excess["backward"] <= slice_bytes + ACTIVATIONS
        assert excess["step"] <= step_bytes(case, device) + slice_bytes
