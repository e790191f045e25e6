"""Conversations as text and as ids, and which of them the assistant wrote.

One idea: a tokenizer's own chat template decides how a conversation reads. Where the template marks what is generated,
with the `generation` tags of transformers, the marks count; otherwise beginnings of the conversation are rendered,
and what a turn adds to its prompt is the assistant's. transformers, which does the like, can't be used here: it loads
torch.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, final

import jinja2
import numpy as np
import numpy.typing as npt
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from uneven.data.records import ASSISTANT, Message
from uneven.data.tokenizer import TokenIds, Tokenizer
from uneven.errors import DataError

# Around what a template marks as generated, until it is rendered. Unicode reserves these two for such uses.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# What a template is told if it asks for the date: always the same day, so that the same conversations give the same
# stream tomorrow. It is the day that Llama's templates name where there is no clock.
_DAY = (2024, 7, 26)

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text; `spans` are the characters that the assistant wrote, ascending."""

    text: str
    spans: tuple[Span, ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChatTemplate:
    """A tokenizer's chat template. `source` names the tokenizer; `fingerprint` is of what decides the text."""

    source: str
    fingerprint: str
    is_tagged: bool
    _template: jinja2.Template = field(repr=False)
    _special: Mapping[str, str] = field(repr=False)
    _backend: tokenizers.Tokenizer = field(repr=False)
    _ends: tuple[str, ...] = field(repr=False)

    def render(self, messages: Sequence[Message], *, where: str) -> Rendered:
        """The text that `apply_chat_template` of transformers gives, and the assistant's part of it.

        DataError, with `where`: the template refuses the conversation, or doesn't tell where a turn begins or ends.
        """
        if self.is_tagged:
            return _unmark(self._text(messages, where=where), where=where)
        text = self._text(messages, where=where)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                prompt = self._text(messages[:index], where=where, add_generation_prompt=True)
                turn = text if index == len(messages) - 1 else self._text(messages[: index + 1], where=where)
                if not (text.startswith(turn) and turn.startswith(prompt)):
                    raise DataError(
                        f"{where}: the chat template of the tokenizer {self.source!r} renders the beginning of this "
                        f"conversation otherwise than the whole, so message {index + 1} can't be told from the rest; "
                        "needed is a template with {% generation %} tags around what the assistant writes"
                    )
                spans.append((len(prompt), len(prompt) + len(self._up_to_end_of_turn(turn[len(prompt) :]))))
        return Rendered(text, tuple(spans))

    def encode(self, conversations: Sequence[Rendered]) -> list[tuple[TokenIds, npt.NDArray[np.bool_]]]:
        """For each conversation its ids, names of special tokens read as such, and which of them are the assistant's.

        A token is the assistant's if any of its characters is.
        """
        encodings = self._backend.encode_batch([each.text for each in conversations], add_special_tokens=False)
        result = []
        for encoding, conversation in zip(encodings, conversations, strict=True):
            starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
            is_assistants = np.zeros(len(starts), dtype=np.bool_)
            for start, end in conversation.spans:
                is_assistants |= (starts < end) & (ends > start)
            result.append((np.array(encoding.ids, dtype=np.uint32), is_assistants))
        return result

    def _text(self, messages: Sequence[Message], *, where: str, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except Exception as error:  # a template is a program, and raises whatever it comes upon
            reason = str(error) or type(error).__name__
            raise DataError(f"{where}: the chat template of the tokenizer {self.source!r} fails: {reason}") from error

    def _up_to_end_of_turn(self, turn: str) -> str:
        """`turn` without the white space behind the token that ends it; all of it if no such token does."""
        stripped = turn.rstrip()
        return stripped if stripped.endswith(self._ends) else turn


def read_template(tokenizer: Tokenizer, *, where: str) -> ChatTemplate:
    """The template in a tokenizer's files; DataError if there is none, or none that compiles. `where` needs it."""
    config = _json_file(tokenizer, "tokenizer_config.json")
    text = config.get("chat_template")
    if "chat_template.jinja" in tokenizer.files:
        text = tokenizer.files["chat_template.jinja"].decode("utf-8", errors="replace")
    elif isinstance(text, list):  # several by name
        text = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}.get("default")
    if not isinstance(text, str):
        raise DataError(
            f"{where} is a conversation, but the tokenizer {tokenizer.source!r} has no chat template; needed is a "
            "chat_template.jinja, or a chat_template in tokenizer_config.json, in the tokenizer's folder"
        )
    special, backend = _special_tokens(tokenizer, config), _chat_backend(tokenizer)
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    return ChatTemplate(
        source=tokenizer.source,
        fingerprint=hashlib.sha256(json.dumps([text, special], sort_keys=True).encode()).hexdigest(),
        is_tagged=_GENERATION_TAG.search(text) is not None,
        _template=_compile(text, source=tokenizer.source),
        _special=special,
        _backend=backend,
        _ends=tuple(token for token in added if token.strip()),
    )


def _special_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """What templates know as `bos_token`, `eos_token` and the like."""
    tokens = {}
    for key, value in {**_json_file(tokenizer, "special_tokens_map.json"), **config}.items():
        name = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(name, str):
            tokens[key] = name
    eos = None if tokenizer.eos_id is None else tokenizer.backend.id_to_token(tokenizer.eos_id)
    if eos is not None:
        tokens.setdefault("eos_token", eos)
    return tokens


def _chat_backend(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer that reads special tokens as such, and whose offsets leave no white space out."""
    stored = json.loads(tokenizer.files["tokenizer.json"])
    stored |= {"post_processor": None, "truncation": None, "padding": None}
    return tokenizers.Tokenizer.from_str(json.dumps(stored))


def _json_file(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    value = json.loads(tokenizer.files.get(name, b"{}"))
    return value if isinstance(value, dict) else {}


class _Generation(Extension):
    """The tag pair `generation`, which marks its content."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _compile(text: str, *, source: str) -> jinja2.Template:
    """With the settings, filters and functions that transformers gives to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = datetime(*_DAY).strftime
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template of the tokenizer {source!r} is no Jinja template: {error}") from error


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _unmark(marked: str, *, where: str) -> Rendered:
    parts = re.split(f"([{_OPEN}{_CLOSE}])", marked)
    texts, marks = parts[0::2], parts[1::2]
    if "".join(marks) != (_OPEN + _CLOSE) * (len(marks) // 2):
        raise DataError(f"{where}: generated parts lie within each other, or the text holds U+FDD0 or U+FDD1")
    ends = np.cumsum([len(text) for text in texts])
    return Rendered("".join(texts), tuple((int(ends[i]), int(ends[i + 1])) for i in range(0, len(marks), 2)))
