"""Packed sequences for training and for evaluation.

One idea: a dataset is a small value that any process can be sent; the tokens stay in files, which each
process maps for itself. Imports no torch: rows are numpy arrays.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from uneven.data.corpus import Corpus
from uneven.data.documents import Flags
from uneven.data.draft import Tokens
from uneven.data.order import sample_index
from uneven.data.rows import Rows, counted
from uneven.data.token_cache import Stream, cached_stream
from uneven.data.tokenizer import Tokenizer
from uneven.errors import DataError

_CHUNK_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class Packing:
    """How streams become rows: of `seq_len` inputs, attention and positions restarting at documents or not."""

    seq_len: int
    holdout: float
    restarts: bool = True

    def __post_init__(self) -> None:
        if self.seq_len < 1 or not 0 < self.holdout < 1:
            raise DataError(
                f"can't cut a dataset with seq_len {self.seq_len} and holdout {self.holdout}; "
                "needed is a seq_len of at least 1 and a holdout between 0 and 1, both excluded"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """`num_rows` rows of a stream from row `first` on.

    Of texts, row i is the seq_len + 1 tokens from i * seq_len on, so that each token is a target once; what is left
    over at the end, fewer than seq_len tokens, is not used. Of conversations it is the i-th row laid out.
    """

    stream: Stream
    packing: Packing
    first: int
    num_rows: int

    @property
    def stride(self) -> int:
        return self.stream.row_tokens or self.packing.seq_len

    @property
    def targets(self) -> slice:
        """Where the targets of all rows lie in the stream."""
        # A row of a conversation starts with a token that is no target anyway.
        skipped = 1 if self.stream.row_tokens is None else 0
        return slice(self.first * self.stride + skipped, (self.first + self.num_rows) * self.stride + skipped)

    def open(self) -> "PartReader":
        """Map the files; DataError if one is missing or not as long as it was."""
        tokens, flags = self.stream.open()
        return PartReader(self, tokens, flags)


@final
@dataclass(frozen=True, slots=True, eq=False)
class PartReader:
    """A part opened in this process."""

    part: Part
    tokens: Tokens = field(repr=False)
    flags: Flags = field(repr=False)

    def rows(self, indices: Sequence[int]) -> Rows:
        """The rows of these numbers; DataError outside 0..num_rows-1."""
        packing = self.part.packing
        tokens = np.empty((len(indices), packing.seq_len + 1), dtype=np.int64)
        flags = np.empty(tokens.shape, dtype=np.uint8)
        for row, index in enumerate(indices):
            where = self._where(index)
            tokens[row], flags[row] = self.tokens[where], self.flags[where]
        return Rows(tokens, flags, packing.restarts)

    def num_targets(self, indices: Sequence[int]) -> int:
        """How many targets the loss counts in these rows."""
        packing = self.part.packing
        if self.part.stream.row_tokens is None and not packing.restarts:
            return len(indices) * packing.seq_len
        rows = (self.flags[self._where(index)] for index in indices)
        return sum(int(np.count_nonzero(counted(row[1:], restarts=packing.restarts))) for row in rows)

    def counts(self, *, vocab_size: int) -> npt.NDArray[np.int64]:
        """How often each id is a target."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        tokens, flags = self.tokens[self.part.targets], self.flags[self.part.targets]
        for start in range(0, len(tokens), _CHUNK_TOKENS):  # bincount copies its argument to int64
            chunk = slice(start, start + _CHUNK_TOKENS)
            is_counted = counted(flags[chunk], restarts=self.part.packing.restarts)
            counts += np.bincount(tokens[chunk][is_counted], minlength=vocab_size)
        return counts

    def _where(self, index: int) -> slice:
        if not 0 <= index < self.part.num_rows:
            raise DataError(f"no sequence {index} in this part of {self.part.stream.path}: it has {self.part.num_rows}")
        start = (self.part.first + index) * self.part.stride
        return slice(start, start + self.part.packing.seq_len + 1)


@dataclass(frozen=True, slots=True)
class TokenDataset:
    """The rows for training and those held out for evaluation.

    `unigram_entropy`, in nats per token, is the loss on the held-out targets of the best model without context: token
    frequencies of the training targets, add-one smoothed over the vocabulary.
    """

    train: Part
    heldout: Part
    vocab_size: int
    unigram_entropy: float

    @property
    def num_train(self) -> int:
        return self.train.num_rows

    @property
    def num_heldout(self) -> int:
        return self.heldout.num_rows

    def open(self) -> "TokenReader":
        """Map the files; DataError if one is missing or not as long as it was."""
        return TokenReader(train=self.train.open(), heldout=self.heldout.open())


@final
@dataclass(frozen=True, slots=True, eq=False)
class TokenReader:
    """A dataset opened in this process. Send other processes the dataset: a sent reader copies the tokens."""

    train: PartReader
    heldout: PartReader

    def batch(self, numbers: Sequence[int], *, seed: int) -> Rows:
        """The training rows of these global sample numbers."""
        return self.train.rows(self._indices(numbers, seed=seed))

    def num_targets(self, numbers: Sequence[int], *, seed: int) -> int:
        """How many targets the loss counts in the training rows of these global sample numbers."""
        return self.train.num_targets(self._indices(numbers, seed=seed))

    def _indices(self, numbers: Sequence[int], *, seed: int) -> list[int]:
        return [sample_index(number, seed=seed, num_sequences=self.train.part.num_rows) for number in numbers]


def prepare_dataset(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    heldout: Corpus | None = None,
    packing: Packing,
    cache: Path,
    progress: Callable[[int, int], None] | None = None,
) -> TokenDataset:
    """A corpus as a stream of tokens, cut into rows, and the held-out rows.

    Streams are kept in the folder `cache` and used again. Without a held-out corpus, the last fraction `holdout` of
    the rows, rounded to whole ones and at least one, is held out; at least one is for training. `progress` is called
    with (bytes done, bytes in all) of each corpus. Several processes may call this at once. DataError: too few
    tokens, a cache that can't be written, a document that changed, a record that is wrong.
    """

    def stream_of(corpus: Corpus) -> Stream:
        return cached_stream(corpus, tokenizer, seq_len=packing.seq_len, cache=cache, progress=progress)

    stream = stream_of(corpus)
    num_rows = _num_rows(stream, corpus, packing=packing, num_needed=2 if heldout is None else 1)
    if heldout is None:
        num_heldout = min(max(round(num_rows * packing.holdout), 1), num_rows - 1)
        train = Part(stream, packing, 0, num_rows - num_heldout)
        rest = Part(stream, packing, train.num_rows, num_heldout)
    else:
        train, other = Part(stream, packing, 0, num_rows), stream_of(heldout)
        rest = Part(other, packing, 0, _num_rows(other, heldout, packing=packing, num_needed=1))
    entropy = _unigram_entropy(train.open(), rest.open(), vocab_size=tokenizer.vocab_size)
    return TokenDataset(train, rest, tokenizer.vocab_size, entropy)


def _num_rows(stream: Stream, corpus: Corpus, *, packing: Packing, num_needed: int) -> int:
    """Rows in a stream; DataError unless there are enough for training and evaluation."""
    seq_len, num_tokens = packing.seq_len, stream.num_tokens
    parts = "one training and one held-out sequence" if num_needed == 2 else "one sequence"
    if stream.row_tokens is None:
        num_rows, found = (num_tokens - 1) // seq_len, f"{num_tokens} tokens found, {num_needed * seq_len + 1} needed"
    else:
        num_rows = num_tokens // stream.row_tokens
        content = stream.content
        found = (
            f"{content.num_documents} conversations found, and {content.num_dropped} of which the cut leaves nothing "
            f"to learn; they fill {num_rows} rows, {num_needed} needed"
        )
    if num_rows < num_needed:
        raise DataError(
            f"{corpus.description} is too short: {found} for {parts} of seq_len {seq_len}; add text or shorten seq_len"
        )
    return num_rows


def _unigram_entropy(train: PartReader, heldout: PartReader, *, vocab_size: int) -> float:
    """-1/H * sum over held-out tokens of log((count in train + 1) / (num_train + vocab_size)), in nats."""
    train_counts, heldout_counts = train.counts(vocab_size=vocab_size), heldout.counts(vocab_size=vocab_size)
    log_probs = np.log(train_counts + 1) - math.log(train_counts.sum() + vocab_size)
    return float(-(heldout_counts @ log_probs) / max(heldout_counts.sum(), 1))
