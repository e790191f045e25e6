"""Records: texts and conversations in files, and what is said of those that are wrong."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from uneven.data import Corpus, Fields, Packing, load_tokenizer, prepare_dataset, read_corpus
from uneven.data.records import holds_records, read_records
from uneven.errors import DataError

BYTE = load_tokenizer("byte")
QUESTION, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}


def write_lines(path: Path, *records: Any) -> Path:
    content = "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def texts(corpus: Corpus, cache: Path, *, seq_len: int = 4) -> list[str]:
    """The documents of a corpus, as its stream has them."""
    dataset = prepare_dataset(corpus, BYTE, packing=Packing(seq_len, 0.5), cache=cache)
    tokens, _ = dataset.train.stream.open()
    return BYTE.decode(tokens).split("<|endoftext|>")[:-1]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("a.jsonl", True),
        ("A.JSONL", True),
        ("a.jsonl.gz", True),
        ("a.json.gz", True),
        ("a.parquet", True),
        ("a.json", False),
        ("a.gz", False),
        ("jsonl", False),
    ],
)
def test_names_say_what_holds_records(name: str, answer: bool) -> None:
    assert holds_records(Path(name)) is answer


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz"])
def test_texts_and_conversations_are_read_with_their_lines(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / name, {"text": "Grüße\n", "id": 3}, "", {"messages": [QUESTION, ANSWER]})
    records = list(read_records(path, Fields()))
    assert [record.content for record in records] == ["Grüße\n", [QUESTION, ANSWER]]
    assert [record.where for record in records] == [f"{path}, line 1", f"{path}, line 3"]
    assert records[-1].num_bytes_done <= path.stat().st_size


def test_other_fields_are_read_where_the_configuration_names_them(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"body": "yes", "text": "no"}, {"chat": [QUESTION, ANSWER], "body": "no"})
    found = [record.content for record in read_records(path, Fields("body", "chat"))]
    assert found == ["yes", [QUESTION, ANSWER]]


def test_keys_without_a_value_are_as_if_absent(tmp_path: Path) -> None:
    whole = {"messages": [QUESTION | {"name": None}, ANSWER], "text": None}
    path = write_lines(tmp_path / "a.jsonl", whole, {"messages": [QUESTION, ANSWER]})
    one, other = read_records(path, Fields())
    assert (one.content, one.digest) == (other.content, other.digest)


WRONG = {
    "no JSON": ('{"text": "a"', "not valid JSON: Expecting ',' delimiter"),
    "a list": ([1], "holds a JSON list; needed is an object"),
    "a number": ("3", "holds a JSON int"),
    "neither field": ({"body": "x"}, "neither a text field 'text' .* nor a messages field 'messages' .*\\['body'\\]"),
    "text that is a number": ({"text": 3}, "'text' is 3; needed is a string"),
    "text that is null": ({"text": None}, "'text' is null; needed is a string"),
    "a lone surrogate": ('{"text": "a\\ud800"}', "'\\\\ud800' is a lone surrogate"),
    "no messages": ({"messages": []}, "'messages' is \\[\\]; needed is a list of at least one message"),
    "messages that are null": ({"messages": None}, "'messages' is null; needed is a list"),
    "messages that are a text": ({"messages": "hello"}, "'messages' is \"hello\"; needed is a list"),
    "a message that is a text": (
        {"messages": ["hi"]},
        "'messages', message 1 is \"hi\"; needed is an object with role and cont",
    ),
    "no assistant": (
        {"messages": [QUESTION]},
        "'messages' has no message of the role 'assistant' to learn from, found \\['user'\\]",
    ),
    "no role": ({"messages": [{"content": "a"}]}, "'messages', message 1 has no role, found \\['content'\\]"),
    "no content": (
        {"messages": [QUESTION, {"role": "assistant"}]},
        "'messages', message 2 has no content, found \\['role'\\]",
    ),
    "content of parts": (
        {"messages": [QUESTION | {"content": [{"type": "text", "text": "a"}]}, ANSWER]},
        "'messages', message 1: content is .*; needed is a string",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_file_and_line_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    record, message = WRONG[name]
    path = write_lines(tmp_path / "a.jsonl", {"text": "fine"}, record)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: {message}"):
        prepare_dataset(read_corpus([str(path)]), BYTE, packing=Packing(2, 0.5), cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_calls_of_tools_need_no_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    path = write_lines(tmp_path / "a.jsonl", {"messages": [QUESTION, call]})
    (record,) = read_records(path, Fields())
    assert record.content[1] == {"role": "assistant", "tool_calls": [{"name": "add"}]}


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b'{"text": "abc"}\n' * 99)[:-20]])
def test_a_compressed_file_that_is_broken_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"can't read .*a\.jsonl\.gz: "):
        list(read_records(tmp_path / "a.jsonl.gz", Fields()))


def test_bytes_that_are_not_utf8_are_refused_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 2: not valid JSON: 'utf-8' codec"):
        list(read_records(tmp_path / "a.jsonl", Fields()))


def test_each_line_is_a_document_as_a_file_would_be(tmp_path: Path) -> None:
    """Equal contents give equal streams, whether from files or lines, in whatever order, once or twice."""
    contents = ["alpha beta", "gamma", "delta epsilon", "zeta"]
    (tmp_path / "files").mkdir()
    for number, content in enumerate(contents):
        (tmp_path / "files" / f"{number}.txt").write_text(content)
    lines = [{"text": content} for content in [*reversed(contents), contents[1], ""]]
    records = read_corpus([str(write_lines(tmp_path / "a.jsonl", *lines))])
    mixed = read_corpus([str(write_lines(tmp_path / "b.jsonl", *lines[:2])), str(tmp_path / "files")])
    expected = texts(read_corpus([str(tmp_path / "files")]), tmp_path / "cache")
    assert sorted(expected) == sorted(contents)
    assert texts(records, tmp_path / "cache") == texts(mixed, tmp_path / "cache") == expected
    dataset = prepare_dataset(records, BYTE, packing=Packing(4, 0.5), cache=tmp_path / "cache")
    assert (dataset.train.stream.content.num_documents, dataset.train.stream.num_repeated) == (4, 1)


def test_the_same_bytes_are_another_corpus_as_text_and_with_other_fields(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", {"text": "abc"})
    (tmp_path / "a.txt").write_bytes(lines.read_bytes())
    corpora = [
        read_corpus([str(lines)]),
        read_corpus([str(tmp_path / "a.txt")]),
        read_corpus([str(lines)], fields=Fields("body")),
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == 3


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl.gz", *({"text": f"line {n} " * 9} for n in range(50)))
    calls: list[tuple[int, int]] = []
    corpus = read_corpus([str(path)])
    prepare_dataset(
        corpus, BYTE, packing=Packing(9, 0.1), cache=tmp_path / "c", progress=lambda *call: calls.append(call)
    )
    assert calls == sorted(calls)
    assert calls[-1] == (corpus.num_bytes, corpus.num_bytes)


def test_a_file_of_records_that_changes_is_noticed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "abcdefgh"})
    corpus = read_corpus([str(path)])
    write_lines(path, {"text": "another"})
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was in use"):
        prepare_dataset(corpus, BYTE, packing=Packing(2, 0.5), cache=tmp_path / "cache")


def test_no_records_are_too_few(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": ""}, "")
    with pytest.raises(DataError, match=r"too short: 0 tokens found, 5 needed"):
        prepare_dataset(read_corpus([str(path)]), BYTE, packing=Packing(2, 0.5), cache=tmp_path / "cache")


def test_parquet_rows_are_records(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs the extra uneven[datasets]")
    pytest.importorskip("datasets", reason="Parquet needs the extra uneven[datasets]")
    import pyarrow

    path = tmp_path / "a[1].parquet"  # no pattern
    rows = [{"messages": [QUESTION, ANSWER | {"name": "x"}], "text": None}, {"messages": None, "text": "plain"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    records = list(read_records(path, Fields()))
    assert [record.content for record in records] == [[QUESTION, ANSWER | {"name": "x"}], "plain"]
    assert [record.where for record in records] == [f"{path}, row 1", f"{path}, row 2"]
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"can't read the Parquet file .*a\[1\]\.parquet: .*"):
        list(read_records(path, Fields()))


def test_parquet_without_the_package_says_how_to_install_it(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"a\.parquet: .*datasets.* pip install 'uneven\[datasets\]'"):
        list(read_records(tmp_path / "a.parquet", Fields()))
