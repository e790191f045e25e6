"""Token streams and packed sequences: what is in them, what is kept on disk, what happens to damage."""

import itertools
import json
import math
import multiprocessing
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from uneven.data import (
    Corpus,
    TokenDataset,
    Tokenizer,
    load_tokenizer,
    prepare_dataset,
    read_corpus,
    sample_index,
    token_cache,
)
from uneven.data.token_cache import split_text
from uneven.errors import DataError

BYTE = load_tokenizer("byte")


def make_corpus(folder: Path, *texts: str) -> Corpus:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return read_corpus([str(folder)])


def stream(corpus: Corpus) -> list[int]:
    """What the byte stream must be."""
    return [token for document in corpus.documents for token in [*document.read().encode(), 256]]


def prepare(tmp_path: Path, corpus: Corpus, *, seq_len: int = 4, holdout: float = 0.25) -> TokenDataset:
    return prepare_dataset(corpus, BYTE, seq_len=seq_len, holdout=holdout, cache=tmp_path / "cache")


def word_tokenizer(path: Path, *, num_words: int) -> Tokenizer:
    """Words "0", "1", ... by their number, without an end of text."""
    vocab = {str(number): number for number in range(num_words)}
    model = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="0"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save(str(path))
    return load_tokenizer(str(path))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return make_corpus(tmp_path / "texts", "Grüße aus Köln", "def f():\n    return 1\n", "third <|endoftext|>")


def test_file_holds_the_documents_in_order_each_with_its_end(tmp_path: Path, corpus: Corpus) -> None:
    dataset = prepare(tmp_path, corpus)
    assert np.fromfile(dataset.path, dtype=dataset.dtype).tolist() == stream(corpus)
    assert (dataset.num_tokens, dataset.dtype) == (corpus.num_bytes + 3, "<u2")


def test_rows_are_the_stream_cut_with_one_token_of_overlap(tmp_path: Path, corpus: Corpus) -> None:
    dataset, tokens = prepare(tmp_path, corpus), stream(corpus)
    reader = dataset.open()
    assert dataset.num_train + dataset.num_heldout == (len(tokens) - 1) // 4
    rows = [reader.sequence(i) for i in range(dataset.num_train)]
    rows += [reader.heldout(i) for i in range(dataset.num_heldout)]
    for i, row in enumerate(rows):
        assert row.tolist() == tokens[4 * i : 4 * i + 5]
        assert row.dtype == np.int64
        assert type(row) is np.ndarray


@settings(max_examples=60, deadline=None)
@given(
    num_words=st.integers(1, 200),
    seq_len=st.integers(1, 70),
    holdout=st.floats(0, 1, exclude_min=True, exclude_max=True),
)
def test_parts_cover_the_stream_once_or_the_error_says_why(
    tmp_path_factory: pytest.TempPathFactory, num_words: int, seq_len: int, holdout: float
) -> None:
    folder = tmp_path_factory.getbasetemp() / "parts"
    folder.mkdir(exist_ok=True)
    (folder / "text").write_text("x" * (num_words - 1) + "y")
    found = read_corpus([str(folder / "text")])
    num_tokens = num_words + 1
    if num_tokens < 2 * seq_len + 1:
        message = rf"too short: {num_tokens} tokens found, {2 * seq_len + 1} needed .* seq_len {seq_len};"
        with pytest.raises(DataError, match=message):
            prepare_dataset(found, BYTE, seq_len=seq_len, holdout=holdout, cache=folder / "cache")
        return
    dataset = prepare_dataset(found, BYTE, seq_len=seq_len, holdout=holdout, cache=folder / "cache")
    num_sequences = (num_tokens - 1) // seq_len
    assert dataset.num_train + dataset.num_heldout == num_sequences
    assert min(dataset.num_train, dataset.num_heldout) >= 1
    assert abs(dataset.num_heldout - num_sequences * holdout) <= 1


@pytest.mark.parametrize(("seq_len", "holdout"), [(0, 0.5), (-3, 0.5), (4, 0.0), (4, 1.0), (4, math.nan)])
def test_impossible_cuts_are_refused(tmp_path: Path, corpus: Corpus, seq_len: int, holdout: float) -> None:
    with pytest.raises(DataError, match=rf"seq_len {seq_len} and holdout {holdout}; needed is"):
        prepare(tmp_path, corpus, seq_len=seq_len, holdout=holdout)


def test_batch_reads_the_sequences_of_its_sample_numbers(tmp_path: Path, corpus: Corpus) -> None:
    dataset = prepare(tmp_path, corpus)
    reader = dataset.open()
    numbers = [0, 5, 5, 10**6]
    batch = reader.batch(numbers, seed=3)
    assert batch.shape == (4, 5)
    assert batch.dtype == np.int64
    for row, number in zip(batch, numbers, strict=True):
        index = sample_index(number, seed=3, num_sequences=dataset.num_train)
        assert row.tolist() == reader.sequence(index).tolist()
    assert reader.batch([], seed=3).shape == (0, 5)


def test_rows_can_be_written_without_touching_the_file(tmp_path: Path, corpus: Corpus) -> None:
    reader = prepare(tmp_path, corpus).open()
    before = reader.sequence(0).tolist()
    reader.sequence(0)[:] = 7
    assert reader.sequence(0).tolist() == before


def test_index_outside_its_part_is_refused(tmp_path: Path, corpus: Corpus) -> None:
    dataset = prepare(tmp_path, corpus)
    reader = dataset.open()
    for index in (-1, dataset.num_train):
        with pytest.raises(DataError, match=rf"no training sequence {index} in .*: there are {dataset.num_train}"):
            reader.sequence(index)
    for index in (-1, dataset.num_heldout):
        with pytest.raises(DataError, match=rf"no held-out sequence {index} in .*: there are {dataset.num_heldout}"):
            reader.heldout(index)


def test_unigram_entropy_is_the_loss_of_smoothed_frequencies(tmp_path: Path, corpus: Corpus) -> None:
    dataset = prepare(tmp_path, corpus)
    reader = dataset.open()
    counts = Counter(t for i in range(dataset.num_train) for t in reader.sequence(i)[1:].tolist())
    targets = [t for i in range(dataset.num_heldout) for t in reader.heldout(i)[1:].tolist()]
    losses = [-math.log((counts[t] + 1) / (4 * dataset.num_train + 257)) for t in targets]
    assert dataset.unigram_entropy == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_unigram_entropy_of_one_repeated_token_is_near_zero(tmp_path: Path) -> None:
    dataset = prepare(tmp_path, make_corpus(tmp_path / "texts", "a" * 200_000))
    assert 0 < dataset.unigram_entropy < 0.01


def test_tokenizer_without_an_end_of_text_joins_documents(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path / "t.json", num_words=10)
    found = make_corpus(tmp_path / "texts", "1 2 3", "4 5 6 7")
    dataset = prepare_dataset(found, tokenizer, seq_len=2, holdout=0.5, cache=tmp_path / "cache")
    expected = [int(word) for document in found.documents for word in document.read().split()]
    assert np.fromfile(dataset.path, dtype=dataset.dtype).tolist() == expected


def test_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    found = make_corpus(tmp_path / "texts", "65536 65535 7 65536 1")
    for num_words, dtype in ((65536, "<u2"), (65537, "<u4")):
        tokenizer = word_tokenizer(tmp_path / f"{num_words}.json", num_words=num_words)
        dataset = prepare_dataset(found, tokenizer, seq_len=2, holdout=0.5, cache=tmp_path / "cache")
        assert (dataset.dtype, dataset.vocab_size) == (dtype, num_words)
    assert dataset.open().sequence(0).tolist() == [65536, 65535, 7]


def test_stream_is_the_same_whatever_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"line {number}\n" for number in range(40))
    found = make_corpus(tmp_path / "texts", lines, "short", lines.upper())
    monkeypatch.setattr(token_cache, "_PIECE_CHARS", 30)
    monkeypatch.setattr(token_cache, "_BATCH_CHARS", 70)
    calls: list[tuple[int, int]] = []
    dataset = prepare_dataset(
        found,
        BYTE,
        seq_len=8,
        holdout=0.1,
        cache=tmp_path / "cache",
        progress=lambda *call: calls.append(call),
    )
    assert np.fromfile(dataset.path, dtype=dataset.dtype).tolist() == stream(found)
    assert len(calls) > 5
    assert calls == sorted(set(calls))
    assert calls[-1] == (found.num_bytes, found.num_bytes)


@given(st.text(alphabet="ab \n\té", max_size=80), st.integers(1, 20))
def test_pieces_join_to_the_text_and_start_with_a_line(text: str, piece_chars: int) -> None:
    pieces = split_text(text, piece_chars=piece_chars)
    assert "".join(pieces) == text
    for before, after in itertools.pairwise(pieces):
        assert len(before) >= piece_chars
        assert before.endswith("\n")
        assert not before[-2].isspace()
        assert not after[0].isspace()


def test_second_call_uses_the_stream_again(tmp_path: Path, corpus: Corpus) -> None:
    first = prepare(tmp_path, corpus)
    for document in corpus.documents:
        document.path.unlink()  # nothing is left to tokenise
    calls: list[tuple[int, int]] = []
    again = prepare_dataset(
        corpus, BYTE, seq_len=4, holdout=0.25, cache=tmp_path / "cache", progress=lambda *c: calls.append(c)
    )
    assert again == first
    assert calls == [(corpus.num_bytes, corpus.num_bytes)]
    other = prepare(tmp_path, corpus, seq_len=7, holdout=0.5)
    assert (other.path, other.fingerprint) == (first.path, first.fingerprint)


def test_other_texts_and_other_tokenizers_have_other_streams(tmp_path: Path, corpus: Corpus) -> None:
    other = make_corpus(tmp_path / "other", "something else altogether")
    words = word_tokenizer(tmp_path / "t.json", num_words=3)
    datasets = [
        prepare(tmp_path, corpus),
        prepare(tmp_path, other),
        prepare_dataset(corpus, words, seq_len=1, holdout=0.5, cache=tmp_path / "cache"),
    ]
    assert len({dataset.fingerprint for dataset in datasets}) == len({d.path for d in datasets}) == 3


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "gone", "no record", "bad record", "odd record"])
def test_damaged_stream_is_made_again(tmp_path: Path, corpus: Corpus, damage: str) -> None:
    first = prepare(tmp_path, corpus)
    content, record = first.path.read_bytes(), first.path.with_suffix(".json")
    match damage:
        case "cut":
            first.path.write_bytes(content[:-2])
        case "longer":
            first.path.write_bytes(content + b"\0\0")
        case "flipped":
            first.path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "gone":
            first.path.unlink()
        case "no record":
            record.unlink()
        case "bad record":
            record.write_bytes(record.read_bytes()[:10])
        case "odd record":
            record.write_text(json.dumps({"num_tokens": "many", "dtype": "none", "digest": 3}))
    assert prepare(tmp_path, corpus) == first
    assert first.path.read_bytes() == content


def test_nothing_but_the_stream_and_its_record_is_left(tmp_path: Path, corpus: Corpus) -> None:
    dataset = prepare(tmp_path, corpus)
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert names == [dataset.path.with_suffix(".json").name, dataset.path.name]


def test_failure_on_the_way_leaves_no_stream(tmp_path: Path, corpus: Corpus) -> None:
    corpus.documents[-1].path.write_text("changed")
    with pytest.raises(DataError, match=r"changed while it was in use"):
        prepare(tmp_path, corpus)
    assert list((tmp_path / "cache").iterdir()) == []


def test_writers_at_the_same_time_do_no_harm(tmp_path: Path, corpus: Corpus) -> None:
    with ThreadPoolExecutor(8) as pool:
        datasets = list(pool.map(lambda _: prepare(tmp_path, corpus), range(16)))
    assert len(set(datasets)) == 1
    assert np.fromfile(datasets[0].path, dtype=datasets[0].dtype).tolist() == stream(corpus)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, corpus: Corpus) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"can't write the token cache .*cache.*; choose another folder"):
        prepare(tmp_path, corpus)


def test_file_that_is_gone_or_cut_is_refused_when_opened(tmp_path: Path, corpus: Corpus) -> None:
    dataset = prepare(tmp_path, corpus)
    with dataset.path.open("r+b") as file:
        file.truncate(20)
    needed = 2 * dataset.num_tokens
    with pytest.raises(DataError, match=rf"has 20 bytes; needed are {needed} for {dataset.num_tokens} tokens"):
        dataset.open()
    with pytest.raises(DataError, match=r"can't open the token file .*: No such file"):
        replace(dataset, path=tmp_path / "gone").open()


def test_dataset_is_small_when_sent(tmp_path: Path) -> None:
    dataset = prepare(tmp_path, make_corpus(tmp_path / "texts", "some text\n" * 20_000))
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000
    assert pickle.loads(sent) == dataset
    assert pickle.loads(sent).open().sequence(9).tolist() == dataset.open().sequence(9).tolist()


def test_other_processes_read_the_same_rows(tmp_path: Path, corpus: Corpus) -> None:
    dataset = prepare(tmp_path, corpus)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        rows = pool.apply(first_rows, (dataset,))
    assert rows == first_rows(dataset)


def first_rows(dataset: TokenDataset) -> list[list[int]]:
    rows: list[list[int]] = dataset.open().batch(range(3), seed=0).tolist()
    return rows
