"""Records in files: one JSON object a line, or the rows of a Parquet file.

One idea: a record is a text or a conversation, and whatever is wrong with one is said with its file and line.
Imports neither torch nor transformers; the package `datasets`, which loads torch, is imported only to read Parquet.
"""

import glob
import gzip
import hashlib
import json
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uneven.errors import DataError

_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
ASSISTANT = "assistant"

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields that hold a record's text, or its messages; where a record has both, the messages count."""

    text: str = "text"
    messages: str = "messages"


@dataclass(frozen=True, slots=True)
class Record:
    """A text or a conversation: where it stands, its digest, and how many bytes of the file were read for it so far."""

    content: str | list[Message]
    where: str
    digest: bytes
    num_bytes_done: int


def holds_records(path: Path) -> bool:
    """Whether a file holds records, by its name."""
    return path.name.lower().endswith(_SUFFIXES)


def read_records(path: Path, fields: Fields) -> Iterator[Record]:
    """The records of a file in order, blank lines passed over. Raises DataError with the line that is wrong."""
    source = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _json_lines(path)
    for where, value, num_bytes_done in source:
        content = _content(value, fields, where=where)
        yield Record(content, where, _digest(content, where=where), num_bytes_done)


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    try:
        with path.open("rb") as file:
            lines = gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else file
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _json_object(line, where=where), file.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"can't read {path}: {error}") from error


def _json_object(line: bytes, *, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # bad JSON, or bytes that are not UTF-8
        raise DataError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: holds a JSON {type(value).__name__}; needed is an object")
    return value


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"can't read {path}: Parquet needs the package datasets, which is not installed; "
            "install it with: pip install 'uneven[datasets]'"
        ) from None
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what goes wrong is raised, and told once
    try:
        with tempfile.TemporaryDirectory() as scratch:  # its own cache would be in the home folder
            files = {"train": [glob.escape(str(path))]}
            rows = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=scratch)
            for number, row in enumerate(rows, start=1):
                yield f"{path}, row {number}", row, 0
    except Exception as error:  # of pyarrow or datasets, whatever it is
        raise DataError(f"can't read the Parquet file {path}: {error}") from error


def _content(value: Mapping[str, Any], fields: Fields, *, where: str) -> str | list[Message]:
    if value.get(fields.messages) is not None or (fields.messages in value and fields.text not in value):
        return _conversation(value[fields.messages], where=f"{where}: {fields.messages!r}")
    if fields.text not in value:
        raise DataError(
            f"{where}: neither a text field {fields.text!r} (data.text_field) nor a messages field "
            f"{fields.messages!r} (data.messages_field), found {list(value)[:9]}"
        )
    text = value[fields.text]
    if not isinstance(text, str):
        raise DataError(f"{where}: {fields.text!r} is {_shown(text)}; needed is a string")
    return text


def _conversation(value: Any, *, where: str) -> list[Message]:
    """The messages, without the keys that have no value: JSON and Parquet write those differently."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} is {_shown(value)}; needed is a list of at least one message")
    messages = [_message(each, where=f"{where}, message {number}") for number, each in enumerate(value, start=1)]
    roles = [message["role"] for message in messages]
    if ASSISTANT not in roles:
        raise DataError(f"{where} has no message of the role {ASSISTANT!r} to learn from, found {sorted(set(roles))}")
    return messages


def _message(value: Any, *, where: str) -> Message:
    if not isinstance(value, dict):
        raise DataError(f"{where} is {_shown(value)}; needed is an object with role and content")
    message = {key: item for key, item in value.items() if item is not None}
    needed = ("role",) if message.get("tool_calls") else ("role", "content")
    for key in needed:
        if key not in message:
            raise DataError(f"{where} has no {key}, found {list(message)}")
    for key in ("role", "content"):
        if not isinstance(message.get(key, ""), str):
            raise DataError(f"{where}: {key} is {_shown(message[key])}; needed is a string")
    return message


def _digest(content: str | list[Message], *, where: str) -> bytes:
    """Of a text, the digest that a file of it would have."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, sort_keys=True, default=str)
    try:
        return hashlib.sha256(text.encode("utf-8")).digest()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {text[error.start]!r} is a lone surrogate, as JSON escapes may be; needed is valid Unicode"
        ) from None


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
