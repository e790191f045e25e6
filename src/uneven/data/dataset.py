"""Packed sequences for training and for evaluation.

One idea: a dataset is a small value that any process can be sent; the tokens stay in a file, which each
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
from uneven.data.order import sample_index
from uneven.data.token_cache import cached_stream, stream_key
from uneven.data.tokenizer import Tokenizer
from uneven.errors import DataError

_CHUNK_TOKENS = 2**24


@dataclass(frozen=True, slots=True)
class TokenDataset:
    """A stream of `num_tokens` ids in a flat file, cut into sequences.

    Sequence i is the seq_len + 1 tokens from i * seq_len on: inputs are all but its last, targets all but its
    first, so each token is a target once. The first `num_train` sequences are for training, the `num_heldout`
    after them for evaluation; what is left over at the end, fewer than seq_len tokens, is not used. `dtype`
    is the numpy type of the file. `fingerprint` names corpus and tokenizer. `unigram_entropy`, in nats per
    token, is the loss on the held-out targets of the best model without context: token frequencies of the
    training targets, add-one smoothed over the vocabulary.
    """

    path: Path
    dtype: str
    seq_len: int
    num_tokens: int
    num_train: int
    num_heldout: int
    vocab_size: int
    fingerprint: str
    unigram_entropy: float

    def open(self) -> "TokenReader":
        """Map the file; DataError if it is missing or not as long as it was."""
        return TokenReader(dataset=self, tokens=_map(self.path, dtype=self.dtype, num_tokens=self.num_tokens))


@final
@dataclass(frozen=True, slots=True, eq=False)
class TokenReader:
    """A dataset opened in this process. Send other processes the dataset: a sent reader copies the tokens."""

    dataset: TokenDataset
    tokens: npt.NDArray[np.unsignedinteger] = field(repr=False)

    def sequence(self, index: int) -> npt.NDArray[np.int64]:
        """Training sequence `index`, shape (seq_len + 1,); DataError outside 0..num_train-1."""
        return self._row(index, first=0, num_sequences=self.dataset.num_train)

    def heldout(self, index: int) -> npt.NDArray[np.int64]:
        """Held-out sequence `index`, shape (seq_len + 1,); DataError outside 0..num_heldout-1."""
        return self._row(index, first=self.dataset.num_train, num_sequences=self.dataset.num_heldout)

    def batch(self, numbers: Sequence[int], *, seed: int) -> npt.NDArray[np.int64]:
        """The training sequences of these global sample numbers, shape (len(numbers), seq_len + 1)."""
        rows = np.empty((len(numbers), self.dataset.seq_len + 1), dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            row[:] = self.sequence(sample_index(number, seed=seed, num_sequences=self.dataset.num_train))
        return rows

    def _row(self, index: int, *, first: int, num_sequences: int) -> npt.NDArray[np.int64]:
        if not 0 <= index < num_sequences:
            part = "held-out" if first else "training"
            raise DataError(f"no {part} sequence {index} in {self.dataset.path}: there are {num_sequences}")
        start = (first + index) * self.dataset.seq_len
        return self.tokens[start : start + self.dataset.seq_len + 1].astype(np.int64)


def prepare_dataset(
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    holdout: float,
    cache: Path,
    progress: Callable[[int, int], None] | None = None,
) -> TokenDataset:
    """The corpus as one stream of tokens, `eos_id` after each document, cut into sequences.

    The stream is kept in the folder `cache` and used again for any `seq_len` and `holdout`. The last fraction
    `holdout` of the sequences, rounded to whole ones and at least one, is held out; at least one is for
    training. `progress` is called with (bytes done, bytes in all), at last with the two equal. Several
    processes may call this at once. DataError: a seq_len below 1, a holdout outside (0, 1), fewer than 2 *
    seq_len + 1 tokens, a cache that can't be written, a document that changed.
    """
    if seq_len < 1 or not 0 < holdout < 1:
        raise DataError(
            f"can't cut a dataset with seq_len {seq_len} and holdout {holdout}; "
            "needed is a seq_len of at least 1 and a holdout between 0 and 1, both excluded"
        )
    path, record = cached_stream(corpus, tokenizer, cache=cache, progress=progress)
    num_sequences = (record.num_tokens - 1) // seq_len
    if num_sequences < 2:
        raise DataError(
            f"{corpus.description} is too short: {record.num_tokens} tokens found, {2 * seq_len + 1} needed "
            f"for one training and one held-out sequence of seq_len {seq_len}; add text or shorten seq_len"
        )
    num_heldout = min(max(round(num_sequences * holdout), 1), num_sequences - 1)
    num_train = num_sequences - num_heldout
    targets = _map(path, dtype=record.dtype, num_tokens=record.num_tokens)[1 : num_sequences * seq_len + 1]
    return TokenDataset(
        path=path,
        dtype=record.dtype,
        seq_len=seq_len,
        num_tokens=record.num_tokens,
        num_train=num_train,
        num_heldout=num_heldout,
        vocab_size=tokenizer.vocab_size,
        fingerprint=stream_key(corpus, tokenizer),
        unigram_entropy=_unigram_entropy(
            targets[: num_train * seq_len], targets[num_train * seq_len :], vocab_size=tokenizer.vocab_size
        ),
    )


def _map(path: Path, *, dtype: str, num_tokens: int) -> npt.NDArray[np.unsignedinteger]:
    num_bytes = num_tokens * np.dtype(dtype).itemsize
    try:
        found_bytes = path.stat().st_size
        if found_bytes == num_bytes:
            return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(num_tokens,)))
    except OSError as error:
        raise DataError(f"can't open the token file {path}: {error.strerror}; prepare the dataset again") from error
    raise DataError(
        f"the token file {path} has {found_bytes} bytes; needed are {num_bytes} for {num_tokens} tokens; "
        "prepare the dataset again"
    )


def _unigram_entropy(
    train: npt.NDArray[np.unsignedinteger], heldout: npt.NDArray[np.unsignedinteger], *, vocab_size: int
) -> float:
    """-1/H * sum over held-out tokens of log((count in train + 1) / (num_train + vocab_size)), in nats."""
    train_counts = _counts(train, vocab_size=vocab_size)
    heldout_counts = _counts(heldout, vocab_size=vocab_size)
    log_probs = np.log(train_counts + 1) - math.log(len(train) + vocab_size)
    return float(-(heldout_counts @ log_probs) / len(heldout))


def _counts(tokens: npt.NDArray[np.unsignedinteger], *, vocab_size: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK_TOKENS):  # bincount copies its argument to int64
        counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocab_size)
    return counts
