"""Rows: targets and positions at the boundaries of documents, and how many targets there are."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uneven.data import Packing, Rows, load_tokenizer, prepare_dataset, read_corpus
from uneven.data.documents import START, TARGET
from uneven.data.rows import IGNORE

BYTE = load_tokenizer("byte")


def rows_of(flags: list[list[int]], *, restarts: bool = True) -> Rows:
    array = np.array(flags, dtype=np.uint8)
    return Rows(np.arange(100, 100 + array.size, dtype=np.int64).reshape(array.shape), array, restarts)


def test_positions_restart_and_the_first_token_of_a_document_is_no_target() -> None:
    both = START | TARGET
    rows = rows_of([[both, 1, both, 1, 1, both], [1, 1, 1, 1, 1, 1]])
    assert rows.position_ids.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert rows.targets.tolist() == [[101, IGNORE, 103, 104, IGNORE], [107, 108, 109, 110, 111]]
    assert rows.inputs.tolist() == [[100, 101, 102, 103, 104], [106, 107, 108, 109, 110]]


def test_rows_without_a_start_inside_need_no_positions() -> None:
    both = START | TARGET
    assert rows_of([[both, 1, 1, both], [1, 1, 1, 1]]).position_ids is None
    rows = rows_of([[1, 1, both, 1], [1, 1, 1, 1]])
    assert rows[1:].position_ids is None
    assert rows[:1].position_ids.tolist() == [[0, 1, 0]]


def test_without_restarts_a_row_is_one_sequence() -> None:
    both = START | TARGET
    rows = rows_of([[both, 1, both, 1]], restarts=False)
    assert rows.position_ids is None
    assert rows.targets.tolist() == [[101, 102, 103]]


@settings(deadline=None)
@given(st.binary(min_size=18, max_size=18))
def test_positions_count_from_the_last_start(content: bytes) -> None:
    flags = (np.frombuffer(content, dtype=np.uint8).reshape(3, 6) & (START | TARGET)).tolist()
    rows = rows_of(flags)
    positions = rows.position_ids
    if positions is None:
        assert not any(flag & START for row in flags for flag in row[1:-1])
        return
    for row, found in zip(flags, positions.tolist(), strict=True):
        since = 0
        for index, position in enumerate(found):
            since = 0 if index == 0 or row[index] & START else since + 1
            assert position == since


@pytest.mark.parametrize("restarts", [False, True])
def test_targets_of_a_batch_are_counted_as_its_rows_have_them(tmp_path: Path, restarts: bool) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * (1 + number % 4))
    corpus = read_corpus([str(tmp_path)])
    dataset = prepare_dataset(corpus, BYTE, packing=Packing(8, 0.2, restarts), cache=tmp_path / ".cache")
    reader = dataset.open()
    numbers = range(3, 40)
    targets = reader.batch(numbers, seed=5).targets
    assert reader.num_targets(numbers, seed=5) == int((targets != IGNORE).sum())
    assert (reader.num_targets(numbers, seed=5) < targets.size) is restarts
    assert reader.heldout.num_targets([]) == 0
    starts = sum(
        int((part.rows(range(part.part.num_rows)).targets == IGNORE).sum()) for part in (reader.train, reader.heldout)
    )
    assert starts in ((28, 29) if restarts else (0,))  # of 30 documents, all but the first, and perhaps one at the end


def test_a_corpus_of_its_own_is_held_out_whole(tmp_path: Path) -> None:
    for name in ("train", "heldout"):
        (tmp_path / name).write_text(f"{name} " * 20)
    corpora = [read_corpus([str(tmp_path / name)]) for name in ("train", "heldout")]
    dataset = prepare_dataset(corpora[0], BYTE, heldout=corpora[1], packing=Packing(10, 0.5), cache=tmp_path / "cache")
    assert (dataset.num_train, dataset.num_heldout) == (12, 16)
    heldout = dataset.open().heldout.rows(range(16)).tokens
    assert BYTE.decode(heldout[:, :-1].flatten()).startswith("heldout heldout ")
