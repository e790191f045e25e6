"""Text to token ids and back.

One idea: a tokenizer is its files. They are read once, when it is loaded, and written out unchanged when a
model is saved, so that `transformers.AutoTokenizer` reads the same ids from the model folder; "byte" is such
a set of files too, made here. Nothing is downloaded. Imports numpy and tokenizers, never torch or
transformers.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from uneven.errors import DataError

BYTE_SOURCE = "byte"
_END_OF_TEXT = "<|endoftext|>"
_USUAL_EOS = (_END_OF_TEXT, "</s>", "<|im_end|>", "<eos>", "<|end_of_text|>")
_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)

TokenIds = npt.NDArray[np.uint32]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """A tokenizer made by `load_tokenizer`.

    `vocab_size` is 1 + the largest id, special tokens included; `eos_id` stands between documents, None if
    the tokenizer has no such token; `fingerprint` is a hex digest of what decides the ids of a stream.
    """

    source: str
    vocab_size: int
    eos_id: int | None
    fingerprint: str
    backend: tokenizers.Tokenizer = field(repr=False)
    files: Mapping[str, bytes] = field(repr=False)

    def encode(self, text: str) -> TokenIds:
        """The ids of `text`, without special tokens: names of special tokens in the text are plain text.

        DataError: text that is not valid Unicode (a lone surrogate).
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of each text, as `encode` gives them; several texts are encoded in parallel."""
        contents = [_utf8(text) for text in texts]
        if self.source == BYTE_SOURCE:
            return [np.frombuffer(content, dtype=np.uint8).astype(np.uint32) for content in contents]
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """The text of `ids`, special tokens by name.

        Bytes that are no UTF-8 become U+FFFD; ids that the tokenizer doesn't know become nothing, since a
        model's vocabulary is often padded beyond the tokenizer's.
        """
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into `folder`, made if need be; DataError if they can't be written.

        `transformers.AutoTokenizer` reads the same ids from them, with one exception of its own making:
        beside a config.json of a few model types (Qwen2 and Qwen3.5 among them) version 5 builds their
        normalizer (NFC) into any tokenizer, which then composes accents that the files leave alone.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in self.files.items():
                (folder / name).write_bytes(content)
        except OSError as error:
            raise DataError(f"can't save the tokenizer {self.source} in {folder}: {error.strerror}") from error


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer that `source` names: "byte", a path to a tokenizer.json, or a folder that contains one.

    "byte" has ids 0..255 for the byte values and 256 for <|endoftext|>. The `eos_id` of a folder is what its
    tokenizer_config.json, special_tokens_map.json, generation_config.json or config.json says, in that order;
    where none says it, the first usual name that the vocabulary has. DataError: nothing there, no
    tokenizer.json in the folder, a file that is not what it should be, an end of text that is not in the
    vocabulary.
    """
    if source == BYTE_SOURCE:
        return _byte_tokenizer()
    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        lack = "the folder has no tokenizer.json" if path.is_dir() else "no such file or folder"
        raise DataError(
            f"can't load the tokenizer {source!r}: {lack}; "
            f'needed is "{BYTE_SOURCE}", a tokenizer.json or a folder that contains one'
        )
    content = _read(file)
    backend = _backend(content, file=file)
    files = {"tokenizer.json": content}
    if path.is_dir():
        files |= {name: _read(path / name) for name in _COMPANIONS if (path / name).is_file()}
    eos_id = _declared_eos(path, backend) if path.is_dir() else None
    if eos_id is None:
        eos_id = _usual_eos(backend)
    return _assemble(source, backend=backend, files=files, eos_id=eos_id)


def _assemble(source: str, *, backend: tokenizers.Tokenizer, files: dict[str, bytes], eos_id: int | None) -> Tokenizer:
    eos_token = None if eos_id is None else backend.id_to_token(eos_id)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "clean_up_tokenization_spaces": False,
    }
    files.setdefault("tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode())
    return Tokenizer(
        source=source,
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values()),
        eos_id=eos_id,
        fingerprint=hashlib.sha256(files["tokenizer.json"] + f"\neos {eos_id}".encode()).hexdigest(),
        backend=backend,
        files=files,
    )


def _backend(content: bytes, *, file: Path) -> tokenizers.Tokenizer:
    _parse(content, file=file)
    try:
        backend = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception for a file that it can't use
        raise DataError(f"can't load the tokenizer {file}: {error}") from error
    if not backend.get_vocab(with_added_tokens=True):
        raise DataError(f"can't use the tokenizer {file}: its vocabulary has 0 tokens")
    backend.no_truncation()  # both are stored in tokenizer.json and would cut or pad a training stream
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges, its ids the byte values themselves."""
    vocab = {char: value for value, char in enumerate(_byte_chars())}
    model = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([_END_OF_TEXT])
    content = model.to_str(pretty=True).encode()
    backend = _backend(content, file=Path(BYTE_SOURCE))
    return _assemble(
        BYTE_SOURCE,
        backend=backend,
        files={"tokenizer.json": content},
        eos_id=backend.token_to_id(_END_OF_TEXT),
    )


def _byte_chars() -> list[str]:
    """The printable character by which byte-level BPE writes each byte (GPT-2, `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(others)) for value in range(256)]


def _declared_eos(folder: Path, backend: tokenizers.Tokenizer) -> int | None:
    """The id that a model folder's files give for the end of a text, None if they say nothing."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _entry(folder / name, "eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            token_id = backend.token_to_id(token) if isinstance(token, str) else None
            if token_id is None:
                raise DataError(f"{folder / name}: eos_token is {token!r}, which is not in the vocabulary")
            return token_id
    for name in ("generation_config.json", "config.json"):
        token_id = _entry(folder / name, "eos_token_id")
        if isinstance(token_id, list):  # models that stop at several tokens name the main one first
            token_id = token_id[0] if token_id else None
        if token_id is not None:
            if not isinstance(token_id, int) or token_id < 0 or backend.id_to_token(token_id) is None:
                raise DataError(f"{folder / name}: eos_token_id is {token_id!r}, which is not in the vocabulary")
            return token_id
    return None


def _usual_eos(backend: tokenizers.Tokenizer) -> int | None:
    for name in _USUAL_EOS:
        token_id = backend.token_to_id(name)
        if token_id is not None:
            return token_id
    return None


def _entry(file: Path, key: str) -> Any:
    return _parse(_read(file), file=file).get(key) if file.is_file() else None


def _parse(content: bytes, *, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise DataError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{file} holds a JSON {type(value).__name__}; needed is an object")
    return value


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"can't read {file}: {error.strerror}") from error


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"can't encode the text: character {error.start} is {text[error.start]!r}, a lone surrogate; "
            "needed is valid Unicode"
        ) from error
