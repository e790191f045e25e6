"""Token streams on disk.

One idea: an entry's name is a digest of all that decides its contents, so writers of one name write the same
bytes and may race; an entry is a flat file of ids plus a record of its length and digest, published after it,
and what doesn't match its record is made again. Imports no torch.
"""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np

from uneven.data.corpus import Corpus
from uneven.data.tokenizer import Tokenizer
from uneven.errors import DataError

_FORMAT = 1
_PIECE_CHARS = 2**20
_BATCH_CHARS = 4 * 2**20
# Between two full lines: there the pre-tokenizers of byte-level models end a token anyway.
_LINE_START = re.compile(r"(?<=\S\n)(?=\S)")


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What an entry must be: number of ids, their numpy type ("<u2" or "<u4"), digest of the bytes."""

    num_tokens: int
    dtype: str
    digest: str


def stream_key(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """Hex name of the token stream of a corpus under a tokenizer."""
    parts = f"{_FORMAT}\n{corpus.fingerprint}\n{tokenizer.fingerprint}"
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def cached_stream(
    corpus: Corpus, tokenizer: Tokenizer, *, cache: Path, progress: Callable[[int, int], None] | None
) -> tuple[Path, TokenRecord]:
    """The flat file of the stream and its record; made unless `cache` holds a sound entry.

    `progress` is called with (bytes done, bytes in all), at last with the two equal.
    DataError: the folder can't be written, or a document changed.
    """
    path = cache / f"{stream_key(corpus, tokenizer)}.tokens"
    record_path = path.with_suffix(".json")
    record = _sound_record(path, record_path)
    if record is not None:
        if progress is not None:
            progress(corpus.num_bytes, corpus.num_bytes)
        return path, record
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _published(path) as file:
            record = _write_stream(file, corpus=corpus, tokenizer=tokenizer, progress=progress)
        with _published(record_path) as file:
            file.write(json.dumps(asdict(record)).encode())
    except OSError as error:
        raise DataError(f"can't write the token cache {path}: {error.strerror}; choose another folder") from error
    return path, record


def _sound_record(path: Path, record_path: Path) -> TokenRecord | None:
    """The entry's record, or None where there is no entry or its file doesn't match it."""
    try:
        record = TokenRecord(**json.loads(record_path.read_bytes()))
        if path.stat().st_size != record.num_tokens * np.dtype(record.dtype).itemsize:
            return None
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError, TypeError):  # absent, or a record that is not one
        return None
    return record if digest == record.digest else None


def _write_stream(
    file: IO[bytes], *, corpus: Corpus, tokenizer: Tokenizer, progress: Callable[[int, int], None] | None
) -> TokenRecord:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    end = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype=dtype)
    digest = hashlib.sha256()
    num_tokens = num_bytes_done = 0
    for batch in _batches(corpus):
        encoded = tokenizer.encode_batch([piece for piece, _ in batch])
        for ids, (piece, is_last) in zip(encoded, batch, strict=True):
            content = ids.astype(dtype).tobytes() + (end.tobytes() if is_last else b"")
            digest.update(content)
            file.write(content)
            num_tokens += len(content) // dtype.itemsize
            num_bytes_done += len(piece.encode("utf-8"))
        if progress is not None:
            progress(num_bytes_done, corpus.num_bytes)
    return TokenRecord(num_tokens=num_tokens, dtype=dtype.str, digest=digest.hexdigest())


def _batches(corpus: Corpus) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of documents, each with whether it ends its document, in batches of bounded size."""
    batch: list[tuple[str, bool]] = []
    num_chars = 0
    for document in corpus.documents:
        pieces = split_text(document.read(), piece_chars=_PIECE_CHARS)
        for number, piece in enumerate(pieces, start=1):
            batch.append((piece, number == len(pieces)))
            num_chars += len(piece)
            if num_chars >= _BATCH_CHARS:
                yield batch
                batch, num_chars = [], 0
    if batch:
        yield batch


def split_text(text: str, *, piece_chars: int) -> list[str]:
    """`text` in pieces that join to it, cut at the first start of a line after `piece_chars` characters.

    A line starts behind a non-empty line and is not empty or indented; a text without one stays whole. This
    keeps a document of gigabytes within memory and divides it among threads.
    """
    pieces = []
    start = 0
    while len(text) - start > piece_chars:
        cut = _LINE_START.search(text, start + piece_chars)
        if cut is None:
            break
        pieces.append(text[start : cut.start()])
        start = cut.start()
    pieces.append(text[start:])
    return pieces


@contextmanager
def _published(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that gets its name only when it is whole."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("xb") as file:
            yield file
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
