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
    Packing,
    TokenDataset,
    Tokenizer,
    documents,
    load_tokenizer,
    prepare_dataset,
    read_corpus,
    sample_index,
)
from uneven.data.dataset import PartReader
from uneven.data.documents import split_text
from uneven.data.rows import IGNORE
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
    return prepare_dataset(corpus, BYTE, packing=Packing(seq_len, holdout), cache=tmp_path / "cache")


def ids_of(dataset: TokenDataset) -> list[int]:
    """The whole stream of a dataset, from its file."""
    stream = dataset.train.stream
    ids: list[int] = np.fromfile(stream.path, dtype=stream.dtype).tolist()
    return ids


def each_part(dataset: TokenDataset) -> tuple[PartReader, PartReader]:
    reader = dataset.open()
    return reader.train, reader.heldout


def train_rows(dataset: TokenDataset) -> list[list[int]]:
    rows: list[list[int]] = dataset.train.open().rows(range(dataset.num_train)).tokens.tolist()
    return rows


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
    assert ids_of(dataset) == stream(corpus)
    found = dataset.train.stream
    assert (found.num_tokens, found.dtype, found.content.num_documents) == (corpus.num_bytes + 3, "<u2", 3)


def test_rows_are_the_stream_cut_with_one_token_of_overlap(tmp_path: Path, corpus: Corpus) -> None:
    dataset, tokens = prepare(tmp_path, corpus), stream(corpus)
    reader = dataset.open()
    assert dataset.num_train + dataset.num_heldout == (len(tokens) - 1) // 4
    train, heldout = reader.train.rows(range(dataset.num_train)), reader.heldout.rows(range(dataset.num_heldout))
    for i, row in enumerate([*train.tokens, *heldout.tokens]):
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
            prepare(folder, found, seq_len=seq_len, holdout=holdout)
        return
    dataset = prepare(folder, found, seq_len=seq_len, holdout=holdout)
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
    assert batch.tokens.shape == (4, 5)
    assert batch.tokens.dtype == np.int64
    for row, number in zip(batch.tokens, numbers, strict=True):
        index = sample_index(number, seed=3, num_sequences=dataset.num_train)
        assert row.tolist() == reader.train.rows([index]).tokens[0].tolist()
    assert reader.batch([], seed=3).tokens.shape == (0, 5)


def test_rows_can_be_written_without_touching_the_file(tmp_path: Path, corpus: Corpus) -> None:
    reader = prepare(tmp_path, corpus).open().train
    before = reader.rows([0]).tokens.tolist()
    reader.rows([0]).tokens[:] = 7
    assert reader.rows([0]).tokens.tolist() == before


def test_index_outside_its_part_is_refused(tmp_path: Path, corpus: Corpus) -> None:
    dataset = prepare(tmp_path, corpus)
    reader = dataset.open()
    for part in (reader.train, reader.heldout):
        for index in (-1, part.part.num_rows):
            with pytest.raises(
                DataError, match=rf"no sequence {index} in this part of .*: it has {part.part.num_rows}"
            ):
                part.rows([index])


def test_unigram_entropy_is_the_loss_of_smoothed_frequencies(tmp_path: Path, corpus: Corpus) -> None:
    for restarts in (False, True):
        packing = Packing(4, 0.25, restarts)
        dataset = prepare_dataset(corpus, BYTE, packing=packing, cache=tmp_path / "cache")
        train, heldout = (part.rows(range(part.part.num_rows)).targets for part in each_part(dataset))
        counts = Counter(train[train != IGNORE].tolist())
        targets = heldout[heldout != IGNORE].tolist()
        losses = [-math.log((counts[t] + 1) / (counts.total() + 257)) for t in targets]
        assert dataset.unigram_entropy == pytest.approx(sum(losses) / len(losses), rel=1e-12)
        assert counts.total() == train.size - (2 if restarts else 0)  # the starts of two documents


def test_unigram_entropy_of_one_repeated_token_is_near_zero(tmp_path: Path) -> None:
    dataset = prepare(tmp_path, make_corpus(tmp_path / "texts", "a" * 200_000))
    assert 0 < dataset.unigram_entropy < 0.01


def test_tokenizer_without_an_end_of_text_joins_documents(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path / "t.json", num_words=10)
    found = make_corpus(tmp_path / "texts", "1 2 3", "4 5 6 7")
    dataset = prepare_dataset(found, tokenizer, packing=Packing(2, 0.5), cache=tmp_path / "cache")
    expected = [int(word) for document in found.documents for word in document.read().split()]
    assert ids_of(dataset) == expected


def test_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    found = make_corpus(tmp_path / "texts", "65536 65535 7 65536 1")
    for num_words, dtype in ((65536, "<u2"), (65537, "<u4")):
        tokenizer = word_tokenizer(tmp_path / f"{num_words}.json", num_words=num_words)
        dataset = prepare_dataset(found, tokenizer, packing=Packing(2, 0.5), cache=tmp_path / "cache")
        assert (dataset.train.stream.dtype, dataset.vocab_size) == (dtype, num_words)
    assert train_rows(dataset) == [[65536, 65535, 7]]


def test_stream_is_the_same_whatever_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"line {number}\n" for number in range(40))
    found = make_corpus(tmp_path / "texts", lines, "short", lines.upper())
    monkeypatch.setattr(documents, "_PIECE_CHARS", 30)
    monkeypatch.setattr(documents, "_BATCH_CHARS", 70)
    calls: list[tuple[int, int]] = []
    dataset = prepare_dataset(
        found,
        BYTE,
        packing=Packing(8, 0.1),
        cache=tmp_path / "cache",
        progress=lambda *call: calls.append(call),
    )
    assert ids_of(dataset) == stream(found)
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
        corpus, BYTE, packing=Packing(4, 0.25), cache=tmp_path / "cache", progress=lambda *c: calls.append(c)
    )
    assert again == first
    assert calls == [(corpus.num_bytes, corpus.num_bytes)]
    other = prepare(tmp_path, corpus, seq_len=7, holdout=0.5)
    assert other.train.stream == first.train.stream


def test_other_texts_and_other_tokenizers_have_other_streams(tmp_path: Path, corpus: Corpus) -> None:
    other = make_corpus(tmp_path / "other", "something else altogether")
    words = word_tokenizer(tmp_path / "t.json", num_words=3)
    datasets = [
        prepare(tmp_path, corpus),
        prepare(tmp_path, other),
        prepare_dataset(corpus, words, packing=Packing(1, 0.5), cache=tmp_path / "cache"),
    ]
    assert len({dataset.train.stream.fingerprint for dataset in datasets}) == 3


@pytest.mark.parametrize("kind", ["tokens", "flags"])
@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "gone", "no record", "bad record", "odd record"])
def test_damaged_stream_is_made_again(tmp_path: Path, corpus: Corpus, damage: str, kind: str) -> None:
    first = prepare(tmp_path, corpus)
    path = first.train.stream.path.with_suffix(f".{kind}")
    content, record = path.read_bytes(), path.with_suffix(".json")
    match damage:
        case "cut":
            path.write_bytes(content[:-2])
        case "longer":
            path.write_bytes(content + b"\0\0")
        case "flipped":
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "gone":
            path.unlink()
        case "no record":
            record.unlink()
        case "bad record":
            record.write_bytes(record.read_bytes()[:10])
        case "odd record":
            record.write_text(json.dumps({"num_tokens": "many", "dtype": "none", "digest": 3}))
    assert prepare(tmp_path, corpus) == first
    assert path.read_bytes() == content


def test_nothing_but_the_stream_and_its_record_is_left(tmp_path: Path, corpus: Corpus) -> None:
    path = prepare(tmp_path, corpus).train.stream.path
    names = sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert names == [path.with_suffix(suffix).name for suffix in (".flags", ".json", ".tokens")]


def test_failure_on_the_way_leaves_no_stream(tmp_path: Path, corpus: Corpus) -> None:
    corpus.documents[-1].path.write_text("changed")
    with pytest.raises(DataError, match=r"changed while it was in use"):
        prepare(tmp_path, corpus)
    assert list((tmp_path / "cache").iterdir()) == []


def test_writers_at_the_same_time_do_no_harm(tmp_path: Path, corpus: Corpus) -> None:
    with ThreadPoolExecutor(8) as pool:
        datasets = list(pool.map(lambda _: prepare(tmp_path, corpus), range(16)))
    assert len(set(datasets)) == 1
    assert ids_of(datasets[0]) == stream(corpus)
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, corpus: Corpus) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"can't write the token cache .*cache.*; choose another folder"):
        prepare(tmp_path, corpus)


def test_file_that_is_gone_or_cut_is_refused_when_opened(tmp_path: Path, corpus: Corpus) -> None:
    dataset = prepare(tmp_path, corpus)
    stream = dataset.train.stream
    with stream.path.open("r+b") as file:
        file.truncate(20)
    needed = 2 * stream.num_tokens
    with pytest.raises(DataError, match=rf"has 20 bytes; needed are {needed} for {stream.num_tokens} tokens"):
        dataset.open()
    with pytest.raises(DataError, match=r"can't open the token file .*: No such file"):
        replace(stream, path=tmp_path / "gone").open()


def test_dataset_is_small_when_sent(tmp_path: Path) -> None:
    dataset = prepare(tmp_path, make_corpus(tmp_path / "texts", "some text\n" * 20_000))
    sent = pickle.dumps(dataset)
    assert len(sent) < 1500
    assert pickle.loads(sent) == dataset
    assert train_rows(pickle.loads(sent)) == train_rows(dataset)


def test_other_processes_read_the_same_rows(tmp_path: Path, corpus: Corpus) -> None:
    dataset = prepare(tmp_path, corpus)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        rows = pool.apply(first_rows, (dataset,))
    assert rows == first_rows(dataset)


def first_rows(dataset: TokenDataset) -> list[list[int]]:
    rows: list[list[int]] = dataset.open().batch(range(3), seed=0).tokens.tolist()
    return rows
