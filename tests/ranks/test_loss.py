"""Cross entropy over a divided vocabulary equals torch's, and no rank ever holds whole logits."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import layouts, models, oracle
from tests.ranks import parity
from tests.ranks.pool import RankPool
from uneven.comm import World
from uneven.errors import InputError
from uneven.layout import Interval, ParallelPlan
from uneven.parallel.layers import VocabRows
from uneven.parallel.loss import IGNORE, VocabParallelLoss

VOCAB = 31
TOLERANCE = 1e-14
DIVISIONS: dict[str, tuple[tuple[Interval, ...], ...]] = {
    "one": (((0, 31),),),
    "unequal": (((0, 17),), ((17, 28),), ((28, 31),)),
    "no rows in the middle": (((0, 20),), (), ((20, 31),)),
    "no rows on the first": ((), ((0, 31),)),
    "interleaved": (((0, 3), (10, 11), (30, 31)), ((3, 10), (19, 30)), ((11, 19),)),
}


def local_logits(logits: Any, ranges: tuple[Interval, ...]) -> torch.Tensor:
    whole = torch.from_numpy(logits)
    parts = [whole[..., start:stop] for start, stop in ranges]
    return torch.cat(parts, -1) if parts else whole[..., :0].clone()


def loss_and_gradient(
    world: World, logits: Any, division: str, arguments: dict[str, Any], num_items: int
) -> tuple[float, Any]:
    """The loss of one rank's part of the logits, and its gradient. `arguments` are arrays of targets by name."""
    ranges = DIVISIONS[division][world.device]
    mine = local_logits(logits, ranges).requires_grad_()
    loss_function = VocabParallelLoss(VocabRows(ranges, VOCAB, device=mine.device), world.everyone(purpose="tp"))
    tensors: dict[str, Any] = {key: torch.from_numpy(value) for key, value in arguments.items()}
    loss = loss_function(mine, tensors.pop("labels", None), **tensors, num_items_in_batch=num_items)
    loss.backward()
    return float(loss.detach()), mine.grad.numpy()


def assert_equals_torch(pool: RankPool, logits: Any, targets: Any, *, division: str) -> None:
    num_items = 3 * int((targets != IGNORE).sum()) + 1
    whole = torch.from_numpy(logits).requires_grad_()
    flat = torch.from_numpy(targets).flatten()
    needed = F.cross_entropy(whole.flatten(0, -2), flat, ignore_index=IGNORE, reduction="sum") / num_items
    needed.backward()
    num_ranks = len(DIVISIONS[division])
    arguments = {"shift_labels": targets}
    results = pool.run(loss_and_gradient, logits, division, arguments, num_items, num_ranks=num_ranks)
    for (loss, gradient), ranges in zip(results, DIVISIONS[division], strict=True):
        assert loss == pytest.approx(float(needed.detach()), rel=TOLERANCE)
        expected = local_logits(whole.grad.numpy(), ranges)
        error = oracle.relative_error(torch.from_numpy(gradient), expected, scale=whole.grad)
        assert error <= TOLERANCE


def random_case(*, ignored: float = 0.3, scale: float = 3.0) -> tuple[Any, Any]:
    """Logits (2, 9, VOCAB) and targets, some of them ignored."""
    random = np.random.default_rng(5)
    logits = scale * random.standard_normal((2, 9, VOCAB))
    targets = random.integers(0, VOCAB, (2, 9))
    targets[random.random((2, 9)) < ignored] = IGNORE
    return logits, targets


@pytest.mark.parametrize("division", DIVISIONS)
def test_loss_and_gradient_equal_torch_with_ignored_targets(pool: RankPool, division: str) -> None:
    logits, targets = random_case()
    assert 0 < (targets == IGNORE).sum() < targets.size
    assert_equals_torch(pool, logits, targets, division=division)


@pytest.mark.parametrize("division", ["one", "unequal", "no rows in the middle", "interleaved"])
def test_extreme_logits_neither_overflow_nor_underflow(pool: RankPool, division: str) -> None:
    """Logits of 1e4 and -1e4, whose exponentials are infinite and zero; some ranks hold the small ones only."""
    logits, targets = random_case()
    logits[0, :, ::3] = 1e4
    logits[0, :, 1::3] = -1e4
    logits[1] -= 1e4
    logits[1, 4] = -1e4
    logits[1, 5, 30] = 1e4
    assert_equals_torch(pool, logits, targets, division=division)


def test_all_targets_ignored_give_zero_and_no_gradient(pool: RankPool) -> None:
    logits, targets = random_case(ignored=1.1)
    results = pool.run(loss_and_gradient, logits, "unequal", {"shift_labels": targets}, 5, num_ranks=3)
    for loss, gradient in results:
        assert loss == 0.0
        assert np.count_nonzero(gradient) == 0


def test_labels_are_shifted_where_targets_are_not_given(pool: RankPool) -> None:
    logits, labels = random_case()
    shifted = np.concatenate([labels[:, 1:], np.full((2, 1), IGNORE)], axis=1)
    arguments: tuple[dict[str, Any], ...] = ({"labels": labels}, {"shift_labels": shifted})
    by_labels, by_targets = (pool.run(loss_and_gradient, logits, "unequal", each, 7, num_ranks=3) for each in arguments)
    for (loss, gradient), (needed, expected) in zip(by_labels, by_targets, strict=True):
        assert loss == needed
        assert np.array_equal(gradient, expected)


def lone_loss() -> VocabParallelLoss:
    rows = VocabRows(((0, VOCAB),), VOCAB, device=torch.device("cpu"))
    return VocabParallelLoss(rows, oracle.lone_world().everyone(purpose="tp"))


def test_training_without_the_global_number_of_targets_is_refused() -> None:
    logits, targets = map(torch.from_numpy, random_case())
    with pytest.raises(
        InputError, match="training needs num_items_in_batch, the number of target tokens in the global"
    ):
        lone_loss()(logits, None, shift_labels=targets)


def test_a_loss_without_targets_is_refused() -> None:
    logits, _ = map(torch.from_numpy, random_case())
    with pytest.raises(InputError, match="the loss needs labels or shift_labels, found neither"):
        lone_loss()(logits, None, num_items_in_batch=3)


def test_in_evaluation_the_loss_is_the_mean_over_targets() -> None:
    logits, targets = map(torch.from_numpy, random_case())
    with torch.no_grad():
        found = lone_loss()(logits, None, shift_labels=targets)
    needed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(found, needed, rtol=TOLERANCE, atol=0)


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits, targets = map(torch.from_numpy, random_case())
    rounded = logits.bfloat16()
    found = lone_loss()(rounded, None, shift_labels=targets, num_items_in_batch=1)
    needed = F.cross_entropy(rounded.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, needed, rtol=1e-6, atol=0)


class LargestOutput(TorchDispatchMode):
    """Records the shape of the largest tensor that any operation within it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > math.prod(self.shape):
                self.shape = tuple(leaf.shape)
        return out


def largest_in_a_step(world: World, plan: ParallelPlan, rows: parity.Rows) -> tuple[int, ...]:
    """The shape of the largest tensor of forward and backward on one rank, parameters' gradients included."""
    spec = models.model_spec("llama")
    model = parity.divided_model(spec, plan, world=world, dtype=torch.float32)
    with LargestOutput() as largest:
        oracle.call(model, rows, num_tokens=rows[:, 1:].size).backward()
    return largest.shape


def test_no_rank_ever_holds_whole_logits(pool: RankPool) -> None:
    """In forward and backward; a stock model does, which shows that the recorder sees it."""
    spec = models.model_spec("llama")
    plan = ParallelPlan.from_shares(spec.structure, layouts.WORLDS["3"])
    rows = models.token_batch(spec, 16)
    num_logits = rows[:, 1:].size * spec.vocab_size
    for shape in pool.run(largest_in_a_step, plan, rows, num_ranks=3):
        assert math.prod(shape) < 0.5 * num_logits
        assert shape[-1] < 0.5 * spec.vocab_size
    stock = oracle.stock_model(spec, seed=parity.SEED, dtype=torch.float32)
    with LargestOutput() as largest:
        oracle.call(stock, rows, num_tokens=rows[:, 1:].size).backward()
    assert math.prod(largest.shape) >= num_logits


@pytest.mark.parametrize("token", [-1, 1003])
def test_a_token_outside_of_the_vocabulary_is_an_error(token: int) -> None:
    rows = VocabRows(((0, 500), (600, 1003)), 1003, device=torch.device("cpu"))
    with pytest.raises(IndexError):
        rows.lookup(torch.tensor([[3, token]]))
