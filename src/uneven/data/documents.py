"""The documents of a corpus as ids: texts from files and records, or conversations from records.

One idea: a document is its ids and a flag for each of them, whatever it was read from; what follows needs no more.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from uneven.data.chat import ChatTemplate, Rendered, read_template
from uneven.data.corpus import Corpus
from uneven.data.records import Record
from uneven.data.tokenizer import TokenIds, Tokenizer
from uneven.errors import DataError

TARGET, START = 1, 2
"""Flags of a token: the loss may count it; it is the first one of its document."""

Flags = npt.NDArray[np.uint8]

_PIECE_CHARS = 2**20
_BATCH_CHARS = 4 * 2**20
# Between two full lines: there the pre-tokenizers of byte-level models end a token anyway.
_LINE_START = re.compile(r"(?<=\S\n)(?=\S)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A conversation, or a part of a text; `digest` is that of its document if it ends one, otherwise None.

    `num_bytes_done` counts bytes of the corpus up to and with this piece.
    """

    content: str | Rendered
    digest: bytes | None
    is_first: bool
    num_bytes_done: int

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else self.content.text


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids and flags of a piece."""

    piece: Piece
    ids: TokenIds
    flags: Flags


def chat_template(corpus: Corpus, tokenizer: Tokenizer) -> ChatTemplate | None:
    """What renders a corpus of conversations, None for one of texts: its first record tells which it is."""
    files = (document.records(corpus.fields) for document in corpus.documents if document.holds_records)
    first = next(itertools.chain.from_iterable(files), None)
    if first is None or isinstance(first.content, str):
        return None
    return read_template(tokenizer, where=first.where)


def encode_documents(corpus: Corpus, tokenizer: Tokenizer, *, template: ChatTemplate | None) -> Iterator[list[Encoded]]:
    """Batches of bounded size of the encoded pieces of a corpus, in the order in which its files are read.

    A text ends with `eos_id`, where the tokenizer has one, a conversation as its template says. Its first token is
    flagged as a start; a text's tokens are all flagged as targets, of a conversation's those that the assistant wrote.
    DataError: a record that is wrong, or of another kind than the first one; a file that changed.
    """
    for batch in _batches(_pieces(corpus, template)):
        texts = [piece.content for piece in batch if isinstance(piece.content, str)]
        conversations = [piece.content for piece in batch if isinstance(piece.content, Rendered)]
        if template is None:
            end = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype=np.uint32)
            all_ids = tokenizer.encode_batch(texts)
            yield [_encoded_text(piece, ids, end=end) for piece, ids in zip(batch, all_ids, strict=True)]
        else:
            encodings = template.encode(conversations)
            yield [
                Encoded(piece, ids, _with_start(np.where(is_assistants, TARGET, 0), is_target=False))
                for piece, (ids, is_assistants) in zip(batch, encodings, strict=True)
            ]


def _encoded_text(piece: Piece, ids: TokenIds, *, end: TokenIds) -> Encoded:
    if piece.digest is not None:
        ids = np.concatenate([ids, end])
    flags = np.full(len(ids), TARGET)
    return Encoded(piece, ids, _with_start(flags, is_target=True) if piece.is_first else flags.astype(np.uint8))


def _with_start(flags: npt.NDArray[np.int64], *, is_target: bool) -> Flags:
    flags[:1] = START | TARGET if is_target else START
    return flags.astype(np.uint8)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _pieces(corpus: Corpus, template: ChatTemplate | None) -> Iterator[Piece]:
    num_bytes_before = 0
    for document in corpus.documents:
        if document.holds_records:
            for record in document.records(corpus.fields):
                yield from _record_pieces(record, template, num_bytes_before=num_bytes_before)
        elif template is not None:
            raise DataError(
                f"the corpus has conversations and texts, as {document.path}; needed is one kind, since conversations "
                "are kept whole and texts are not"
            )
        else:
            yield from _text_pieces(document.read(), bytes.fromhex(document.digest), num_bytes_before=num_bytes_before)
        num_bytes_before += document.num_bytes


def _record_pieces(record: Record, template: ChatTemplate | None, *, num_bytes_before: int) -> Iterator[Piece]:
    content, num_bytes_done = record.content, num_bytes_before + record.num_bytes_done
    if isinstance(content, str) != (template is None):
        found, first = ("text", "conversations") if isinstance(content, str) else ("conversation", "texts")
        raise DataError(f"{record.where}: a {found} in a corpus that begins with {first}; needed is one kind")
    if isinstance(content, str):
        for piece in _text_pieces(content, record.digest, num_bytes_before=num_bytes_before):
            yield Piece(piece.content, piece.digest, piece.is_first, num_bytes_done)
    elif template is not None:
        yield Piece(template.render(content, where=record.where), record.digest, True, num_bytes_done)


def _text_pieces(text: str, digest: bytes, *, num_bytes_before: int) -> Iterator[Piece]:
    pieces = split_text(text, piece_chars=_PIECE_CHARS) if text else []
    for number, piece in enumerate(pieces, start=1):
        num_bytes_before += len(piece.encode("utf-8"))
        yield Piece(piece, digest if number == len(pieces) else None, number == 1, num_bytes_before)


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
