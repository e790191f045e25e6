"""Find the documents that a model is trained on.

One idea: a corpus is a set of contents. Where files lie, what they are called and how often they are repeated
changes neither the corpus's order nor its fingerprint, so two machines with the same texts get the same
stream. Files of records (`records.py`) stand here as files; their contents are looked at when they are encoded.
"""

import codecs
import glob
import hashlib
import itertools
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from uneven.data.records import Fields, Record, holds_records, read_records
from uneven.errors import DataError

_CHUNK_BYTES = 4 * 2**20
_RECORDS = b"records\0"
"""Digested before the bytes of a file of records, which is another content than a text of the same bytes."""
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class Document:
    """One file, of text or of records: where it was found, its size, and a hex digest of its bytes."""

    path: Path
    num_bytes: int
    digest: str

    @property
    def holds_records(self) -> bool:
        return holds_records(self.path)

    def read(self) -> str:
        """The text, with its line ends as they are; DataError if the file is no longer what it was."""
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise DataError(f"can't read the document {self.path}: {error.strerror}") from error
        self._check(hashlib.sha256(content).hexdigest(), num_bytes=len(content))
        return content.decode("utf-8")

    def records(self, fields: Fields) -> Iterator[Record]:
        """The records; DataError if one is wrong, or at the end if the file is no longer what it was."""
        yield from read_records(self.path, fields)
        now = _examine(self.path)
        self._check(now.digest, num_bytes=now.num_bytes)

    def _check(self, digest: str, *, num_bytes: int) -> None:
        if digest != self.digest:
            raise DataError(
                f"the document {self.path} changed while it was in use: it had {self.num_bytes} bytes "
                f"and digest {self.digest[:12]}, now it has {num_bytes} bytes; read the corpus again"
            )


@dataclass(frozen=True, slots=True)
class Corpus:
    """Distinct, non-empty documents in the order of their digests.

    The order is a function of the contents alone and as good as random, so the tail of the stream is a random
    sample of documents. `num_skipped` counts found files that are not text, `num_repeated` those dropped
    because another has the same bytes. `fields` say how records are read.
    """

    documents: tuple[Document, ...]
    num_skipped: int
    num_repeated: int
    description: str
    fields: Fields = field(default_factory=Fields)

    def __post_init__(self) -> None:
        digests = [document.digest for document in self.documents]
        if not digests:
            raise DataError(
                f"the corpus is empty: 0 bytes of text in {self.description} ({self.num_skipped} files "
                "skipped because they are not UTF-8 text); needed is at least one file with text"
            )
        if any(a >= b for a, b in itertools.pairwise(digests)):
            raise DataError("a corpus's documents must be distinct and in the order of their digests")

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where the documents lie, in the order of the stream."""
        return tuple(document.path for document in self.documents)

    @property
    def num_bytes(self) -> int:
        """Bytes of all documents together."""
        return sum(document.num_bytes for document in self.documents)

    @property
    def fingerprint(self) -> str:
        """Hex digest of the contents, and of how records are read; equal wherever the files lie."""
        lines = [document.digest for document in self.documents]
        if any(document.holds_records for document in self.documents):
            lines += [self.fields.text, self.fields.messages]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_corpus(paths: Sequence[str], *, fields: Fields | None = None) -> Corpus:
    """The corpus made of `paths`, as `find_files` understands them; each file is read once, in bounded
    memory.

    Text is valid UTF-8 without NUL bytes. A file found in a folder, through a glob or in the standard library
    that is not text is skipped and counted. What is in files of records is not looked at here. DataError:
    what `find_files` raises; a file named explicitly that can't be read or is not text (with the byte
    offset); no text at all.
    """
    by_digest: dict[str, Document] = {}
    num_skipped = num_repeated = 0
    for path, is_named in _find(paths).items():
        try:
            document = _examine(path)
        except DataError:
            if is_named:
                raise
            num_skipped += 1
            continue
        if document.digest in by_digest:
            num_repeated += 1
        elif document.num_bytes:
            by_digest[document.digest] = document
    return Corpus(
        documents=tuple(by_digest[digest] for digest in sorted(by_digest)),
        num_skipped=num_skipped,
        num_repeated=num_repeated,
        description=_describe(paths),
        fields=fields or Fields(),
    )


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files that `paths` stand for: each once, absolute, in the order of the entries and sorted within
    one.

    An entry is a file; a folder, which stands for all regular files below it of which no part of the name
    below the folder starts with a dot; or a glob (`**` allowed), which stands for the files it matches. An
    entry that exists is never read as a glob. No entries stand for the source of the running Python's
    standard library, without its tests and without installed packages. Contents are not looked at. DataError:
    an entry that doesn't exist, is no file or folder, or stands for no file.
    """
    return list(_find(paths))


def _find(paths: Sequence[str]) -> dict[Path, bool]:
    """Every file, with whether an entry names it explicitly."""
    if isinstance(paths, str):
        raise DataError(f"the corpus's paths are one string, {paths!r}; needed is a list of strings")
    found: dict[Path, bool] = {}
    if not paths:
        return dict.fromkeys(_library_files(), False)
    for entry in paths:
        is_named = Path(entry).is_file()
        for path in [Path(entry)] if is_named else _expand(entry):
            absolute = Path(os.path.abspath(path))
            found[absolute] = is_named or found.get(absolute, False)
    return found


def _expand(entry: str) -> list[Path]:
    path = Path(entry)
    if path.is_dir():
        files = sorted(_visible_files(path))
        kind = "folder"
    elif path.exists():
        raise DataError(f"the corpus path {entry!r} is neither a file nor a folder")
    elif glob.has_magic(entry):
        files = sorted(match for match in map(Path, glob.glob(entry, recursive=True)) if match.is_file())
        kind = "glob"
    else:
        raise DataError(
            f"the corpus path {entry!r} doesn't exist (looked for {os.path.abspath(entry)}); "
            "needed is a file, a folder or a glob"
        )
    if not files:
        raise DataError(f"the corpus {kind} {entry!r} stands for 0 files; needed is at least 1")
    return files


def _visible_files(folder: Path, *, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below `folder`, hidden ones and folders named in `without` left out; links aren't followed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _library_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _visible_files(folder, without=_NOT_LIBRARY) if path.suffix == ".py"]
    if not files:
        raise DataError(
            f"the default corpus is empty: 0 files *.py of the standard library in {folder}; name a file or folder"
        )
    return sorted(files)


def _examine(path: Path) -> Document:
    """Digest a file and check that it is text or holds records, without keeping it in memory."""
    is_text = not holds_records(path)
    digest = hashlib.sha256() if is_text else hashlib.sha256(_RECORDS)
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    chunk = b""
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                if is_text:
                    decoder.decode(chunk)
                if is_text and (offset := chunk.find(0)) >= 0:
                    raise DataError(f"{path} is not text: NUL byte at byte offset {num_bytes + offset}")
                digest.update(chunk)
                num_bytes += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # error.object is the chunk behind what the decoder kept of the chunk before it
        offset = num_bytes - (len(error.object) - len(chunk)) + error.start
        raise DataError(
            f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at byte offset {offset} "
            f"({error.reason}); convert the file to UTF-8 or leave it out"
        ) from error
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from error
    return Document(path=path, num_bytes=num_bytes, digest=digest.hexdigest())


def _describe(paths: Sequence[str]) -> str:
    if not paths:
        return f"the standard library of Python {platform.python_version()}"
    shown = ", ".join(paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"
