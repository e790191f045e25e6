"""Encoded documents on their way to a token stream: collected in the order in which they are read, written in order
of their digests.

One idea: files are read once, from their beginning to their end, and only ids are ever sorted; 24 bytes a document
stay in memory.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, final

import numpy as np
import numpy.typing as npt

from uneven.data.documents import START, TARGET, Encoded, Flags

Tokens = npt.NDArray[np.unsignedinteger]

_KEY_BYTES = 16
"""Of a digest: enough to tell documents apart, and to put them in its order."""


@final
class Draft:
    """Ids, of the type `dtype`, and flags of documents, in two files that the caller has opened and will close."""

    def __init__(self, tokens: IO[bytes], flags: IO[bytes], *, dtype: "np.dtype[np.unsignedinteger]") -> None:
        self.dtype = dtype
        self._tokens = tokens
        self._flags = flags
        self._keys = bytearray()
        self._ends = array("Q")
        self._num_tokens = 0

    def add(self, encoded: Iterable[Encoded]) -> None:
        """Pieces, those of one document after each other."""
        for each in encoded:
            self._tokens.write(each.ids.astype(self.dtype).tobytes())
            self._flags.write(each.flags.tobytes())
            self._num_tokens += len(each.ids)
            if each.piece.digest is not None:
                self._keys += each.piece.digest[:_KEY_BYTES]
                self._ends.append(self._num_tokens)

    @property
    def num_added(self) -> int:
        """Documents, repeated ones counted again."""
        return len(self._ends)

    def documents(self) -> Iterator[tuple[Tokens, Flags]]:
        """Ids and flags of the distinct documents in the order of their digests."""
        if not self._num_tokens:
            return
        self._tokens.flush()
        self._flags.flush()
        tokens = np.memmap(self._tokens, dtype=self.dtype, mode="r", shape=(self._num_tokens,))
        flags = np.memmap(self._flags, dtype=np.uint8, mode="r", shape=(self._num_tokens,))
        keys = np.frombuffer(self._keys, dtype=">u8").reshape(-1, 2)
        ends = np.frombuffer(self._ends, dtype=np.uint64).astype(np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        is_new = np.ones(len(order), dtype=np.bool_)
        is_new[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
        for index in order[is_new]:
            where = slice(starts[index], ends[index])
            yield tokens[where], flags[where]


@dataclass(frozen=True, slots=True)
class Written:
    """What a stream consists of: its tokens and documents, and what became of conversations that are too long.

    `num_cut` were cut at their end, `num_dropped` left out since nothing of the assistant's was left; `num_padding` of
    the tokens fill rows up.
    """

    num_tokens: int
    num_documents: int
    num_cut: int
    num_dropped: int
    num_padding: int
    digest: str
    flags_digest: str


@final
class StreamWriter:
    """Writes ids and flags, and digests both."""

    def __init__(self, tokens: IO[bytes], flags: IO[bytes], *, dtype: "np.dtype[np.unsignedinteger]") -> None:
        self._files = (tokens, flags)
        self._digests = (hashlib.sha256(), hashlib.sha256())
        self._dtype = dtype
        self._num_tokens = self._num_documents = self._num_cut = self._num_dropped = self._num_padding = 0

    def write_all(self, draft: Draft) -> Written:
        """The documents end to end."""
        for tokens, flags in draft.documents():
            self._write_document(tokens, flags)
        return self._written()

    def write_rows(self, draft: Draft, *, row_tokens: int, padding_id: int) -> Written:
        """The documents whole, in rows of `row_tokens`: where the next does not fit any more, the row is filled up.

        One that is longer than a row is cut at its end, and left out if it has no target then.
        """
        room = 0
        for tokens, flags in draft.documents():
            is_cut = len(tokens) > row_tokens
            if not (flags[1:row_tokens] & TARGET).any():
                self._num_dropped += 1
                continue
            self._num_cut += is_cut
            if len(tokens) > room:
                self._pad(room, padding_id=padding_id)
                room = row_tokens
            self._write_document(tokens[:row_tokens], flags[:row_tokens])
            room -= min(len(tokens), row_tokens)
        self._pad(room, padding_id=padding_id)
        return self._written()

    def _pad(self, count: int, *, padding_id: int) -> None:
        """Padding is a document of its own, so that nothing looks at it, and has no targets."""
        flags = np.zeros(count, dtype=np.uint8)
        flags[:1] = START
        self._write(np.full(count, padding_id, dtype=self._dtype), flags)
        self._num_padding += count

    def _write_document(self, tokens: Tokens, flags: Flags) -> None:
        self._write(tokens, flags)
        self._num_documents += 1

    def _write(self, tokens: Tokens, flags: Flags) -> None:
        for content, file, digest in zip((tokens, flags), self._files, self._digests, strict=True):
            data = content.tobytes()
            file.write(data)
            digest.update(data)
        self._num_tokens += len(tokens)

    def _written(self) -> Written:
        return Written(
            num_tokens=self._num_tokens,
            num_documents=self._num_documents,
            num_cut=self._num_cut,
            num_dropped=self._num_dropped,
            num_padding=self._num_padding,
            digest=self._digests[0].hexdigest(),
            flags_digest=self._digests[1].hexdigest(),
        )
