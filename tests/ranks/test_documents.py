"""Documents that share a row compute as if each were alone: loss and every gradient, in float64 at 1e-12."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests import models, oracle
from tests.ranks import parity
from tests.ranks.pool import RankPool
from uneven.comm import World
from uneven.data import Rows
from uneven.data.documents import START, TARGET
from uneven.data.rows import IGNORE
from uneven.layout import ParallelPlan
from uneven.parallel import KeepFloat64
from uneven.sync import GradReducer
from uneven.train.inputs import model_inputs

WORLDS = {"1": [[1]], "2+1": [[1, 1], [1]], "4+3": [[1, 1, 1, 1], [1, 1, 1]]}
MODELS = ("llama", "mistral-8kv-window", "qwen3")
SEQ_LEN = 17
CPU = torch.device("cpu")

STARTS = ((0, 8), (0,), (3, 4, 5, 17), (0, 1, 2), (), (0, 9, 16), (12,))
"""Where documents start in each of seven rows: the window of five positions is full in some, one is of one token."""


@cache
def rows(name: str) -> Rows:
    """Random tokens; in the last two rows, as of conversations, some of them are no targets."""
    tokens = models.token_batch(models.model_spec(name), len(STARTS), seq_len=SEQ_LEN)
    flags = np.full(tokens.shape, TARGET, dtype=np.uint8)
    flags[5:, ::3] = 0
    for row, starts in enumerate(STARTS):
        flags[row, list(starts)] |= START
    return Rows(tokens, flags, restarts=True)


def documents(batch: Rows) -> list[Rows]:
    """Each document, or the end of one, as a batch of its own."""
    found = []
    for tokens, flags in zip(batch.tokens, batch.flags, strict=True):
        starts = sorted({0, *np.flatnonzero(flags & START).tolist()})
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            found.append(Rows(tokens[None, start:end], flags[None, start:end], restarts=False))
    return [each for each in found if each.targets.size]


def loss_of(model: Any, batch: Rows, *, num_tokens: int) -> torch.Tensor:
    with KeepFloat64():
        loss: torch.Tensor = model(**model_inputs(batch, device=CPU), num_items_in_batch=num_tokens).loss
    return loss


def num_targets(batch: Rows) -> int:
    return int((batch.targets != IGNORE).sum())


@cache
def truth(name: str) -> parity.Truth:
    """The stock model in one process, one document after another."""
    batch = rows(name)
    model = oracle.stock_model(models.model_spec(name), seed=parity.SEED)
    total = 0.0
    for document in documents(batch):
        loss = loss_of(model, document, num_tokens=num_targets(batch))
        loss.backward()
        total += float(loss.detach())
    return parity.Truth(batch.tokens, total, {key: p.grad for key, p in model.named_parameters() if p.grad is not None})


def packed_gradients(world: World, name: str, plan: ParallelPlan, tokens: Any, flags: Any) -> tuple[float, Any]:
    """On one rank: the job's loss and this rank's reduced gradients of packed rows, in micro-batches of two."""
    model = parity.divided_model(models.model_spec(name), plan, world=world, dtype=torch.float64)
    reducer = GradReducer(model, plan, world=world, bucket_bytes=parity.SMALL_BUCKETS)
    batch = Rows(tokens, flags, restarts=True)
    own = plan.batch_range(plan.replica_of(world.device), global_batch=len(batch))
    mine = batch[own.start : own.stop]
    total = torch.zeros((), dtype=torch.float64)
    reducer.begin(-(-len(mine) // 2))
    for first in range(0, len(mine), 2):
        loss = loss_of(model, mine[first : first + 2], num_tokens=num_targets(batch))
        loss.backward()
        total += loss.detach()
    reduced = reducer.finish().by_name()
    return parity.global_loss(world, plan, total), {key: value.numpy() for key, value in reduced.items()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_equal_documents_alone(pool: RankPool, name: str, world: str) -> None:
    plan = ParallelPlan.from_shares(models.model_spec(name).structure, WORLDS[world])
    batch, needed = rows(name), truth(name)
    results = pool.run(packed_gradients, name, plan, batch.tokens, batch.flags, num_ranks=len(plan.devices))
    found = parity.deviation(results, plan, needed)
    assert found.loss <= parity.TOLERANCE
    assert not found.wrong()


@pytest.mark.parametrize("name", MODELS)
def test_the_stock_model_packs_alike(name: str) -> None:
    """So that whoever loads the saved folder gets the same held-out loss."""
    model, batch = oracle.stock_model(models.model_spec(name), seed=parity.SEED), rows(name)
    loss = float(loss_of(model, batch, num_tokens=num_targets(batch)).detach())
    assert loss == pytest.approx(truth(name).loss, rel=parity.TOLERANCE)


def test_documents_would_see_each_other_without_restarts() -> None:
    """The test above would notice."""
    model, batch = oracle.stock_model(models.model_spec("llama"), seed=parity.SEED), rows("llama")
    one = Rows(batch.tokens, np.where(batch.flags & START, 0, batch.flags).astype(np.uint8), restarts=False)
    assert num_targets(one) == num_targets(batch)
    loss = float(loss_of(model, one, num_tokens=num_targets(batch)).detach())
    assert abs(loss - truth("llama").loss) > 1e-3


def test_rows_of_one_document_are_given_no_positions() -> None:
    """Attention then needs no mask, and is the faster for it."""
    assert "position_ids" not in model_inputs(rows("llama")[1:2], device=CPU)
    assert "position_ids" in model_inputs(rows("llama")[0:2], device=CPU)
