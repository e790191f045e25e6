"""Token streams on disk.

One idea: an entry's name is a digest of all that decides its contents, so writers of one name write the same
bytes and may race; an entry is a flat file of ids, one of their flags, and a record of their length and digests,
published after them; what doesn't match its record is made again. Imports no torch.
"""

import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from uneven.data.chat import ChatTemplate
from uneven.data.corpus import Corpus
from uneven.data.documents import Flags, chat_template, encode_documents
from uneven.data.draft import Draft, StreamWriter, Tokens, Written
from uneven.data.tokenizer import Tokenizer
from uneven.errors import DataError

_FORMAT = 2

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Stream:
    """A corpus as ids, in a flat file of the numpy type `dtype`, with a flag for each in the file beside it.

    `row_tokens` is the length of the rows in which a stream of conversations is laid out, None for texts, which stand
    end to end. `num_repeated` documents were left out since others have the same contents.
    """

    path: Path
    dtype: str
    row_tokens: int | None
    num_repeated: int
    content: Written

    @property
    def num_tokens(self) -> int:
        return self.content.num_tokens

    @property
    def fingerprint(self) -> str:
        """Of corpus and tokenizer, and of what else decides the ids."""
        return self.path.stem

    @property
    def flags_path(self) -> Path:
        return self.path.with_suffix(".flags")

    def open(self) -> tuple[Tokens, Flags]:
        """Map both files; DataError if one is missing or not as long as it was."""
        return self._map(self.path, self.dtype), self._map(self.flags_path, "u1")

    def _map(self, path: Path, dtype: str) -> npt.NDArray[Any]:
        num_bytes = self.num_tokens * np.dtype(dtype).itemsize
        try:
            found_bytes = path.stat().st_size
            if found_bytes == num_bytes:
                return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(self.num_tokens,)))
        except OSError as error:
            raise DataError(f"can't open the token file {path}: {error.strerror}; prepare the dataset again") from error
        raise DataError(
            f"the token file {path} has {found_bytes} bytes; needed are {num_bytes} for {self.num_tokens} tokens; "
            "prepare the dataset again"
        )


def cached_stream(
    corpus: Corpus, tokenizer: Tokenizer, *, seq_len: int, cache: Path, progress: Progress | None = None
) -> Stream:
    """The stream of a corpus under a tokenizer; made unless `cache` holds a sound entry.

    Conversations are laid out in rows of `seq_len` + 1 tokens; the stream of texts is the same for any `seq_len`.
    `progress` is called with (bytes done, bytes in all), at last with the two equal. DataError: the folder can't be
    written, a document changed, or a record is wrong.
    """
    template = chat_template(corpus, tokenizer)
    row_tokens = None if template is None else seq_len + 1
    path = cache / f"{_key(corpus, tokenizer, template=template, row_tokens=row_tokens)}.tokens"
    stream = _sound_stream(path)
    if stream is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache) as tokens, tempfile.TemporaryFile(dir=cache) as flags:
                draft = Draft(tokens, flags, dtype=np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4"))
                for batch in encode_documents(corpus, tokenizer, template=template):
                    draft.add(batch)
                    num_bytes_done = batch[-1].piece.num_bytes_done
                    if progress is not None and num_bytes_done < corpus.num_bytes:
                        progress(num_bytes_done, corpus.num_bytes)
                stream = _write(path, draft, row_tokens=row_tokens, padding_id=tokenizer.eos_id or 0)
        except OSError as error:
            raise DataError(f"can't write the token cache {path}: {error.strerror}; choose another folder") from error
    if progress is not None:
        progress(corpus.num_bytes, corpus.num_bytes)
    return stream


def _key(corpus: Corpus, tokenizer: Tokenizer, *, template: ChatTemplate | None, row_tokens: int | None) -> str:
    parts = [_FORMAT, corpus.fingerprint, tokenizer.fingerprint]
    if template is not None:
        parts += [template.fingerprint, row_tokens]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def _sound_stream(path: Path) -> Stream | None:
    """The entry, or None where there is none or its files don't match its record."""
    try:
        record = json.loads(path.with_suffix(".json").read_bytes())
        stream = Stream(path=path, **record | {"content": Written(**record["content"])})
        for file, needed in ((path, stream.content.digest), (stream.flags_path, stream.content.flags_digest)):
            with file.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != needed:
                    return None
        stream.open()
    except (OSError, DataError, ValueError, TypeError, KeyError):  # absent, or a record that is not one
        return None
    return stream


def _write(path: Path, draft: Draft, *, row_tokens: int | None, padding_id: int) -> Stream:
    with _published(path) as tokens, _published(path.with_suffix(".flags")) as flags:
        writer = StreamWriter(tokens, flags, dtype=draft.dtype)
        if row_tokens is None:
            content = writer.write_all(draft)
        else:
            content = writer.write_rows(draft, row_tokens=row_tokens, padding_id=padding_id)
    stream = Stream(
        path=path,
        dtype=draft.dtype.str,
        row_tokens=row_tokens,
        num_repeated=draft.num_added - content.num_documents - content.num_dropped,
        content=content,
    )
    record = asdict(stream)
    del record["path"]
    with _published(path.with_suffix(".json")) as file:
        file.write(json.dumps(record).encode())
    return stream


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
