"""Conversations: how they read, which tokens are the assistant's, and how they lie in rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chats import CHATML, CONVERSATIONS, HEADERS, chat_tokenizer
from uneven.data import Packing, Rows, TokenDataset, Tokenizer, prepare_dataset, read_corpus
from uneven.data.chat import read_template
from uneven.data.rows import IGNORE
from uneven.errors import DataError

PREFIXES = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def learnt(tokenizer: Tokenizer, conversation: list[dict[str, str]]) -> list[str]:
    """The runs of text that the loss counts."""
    template = read_template(tokenizer, where="here")
    ((ids, is_counted),) = template.encode([template.render(conversation, where="here")])
    edges = np.flatnonzero(np.diff(is_counted.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(ids[start:end]) for start, end in edges]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # The line end of the header and those of the answer are one token, and the answer's.
        (CHATML, [["4<|im_end|>"], ["\n\n\nle chat é assis <|im_end|>", "le chien\n\n\n<|im_end|>"]]),
        (HEADERS, [["4<|eot|>"], ["le chat é assis<|eot|>", "le chien<|eot|>"]]),
        (PREFIXES, [["4;"], ["\n\nle chat é assis ;", "le chien\n\n\n;"]]),
    ],
)
def test_what_the_assistant_wrote_counts_up_to_the_end_of_its_turn(
    tmp_path: Path, template: str, expected: list[list[str]]
) -> None:
    tokenizer = chat_tokenizer(tmp_path, template)
    assert [learnt(tokenizer, conversation) for conversation in CONVERSATIONS[:2]] == expected


def test_two_answers_in_a_row_count_both(tmp_path: Path) -> None:
    found = learnt(chat_tokenizer(tmp_path, CHATML), CONVERSATIONS[2])
    assert found == ["<|im_end|>", '<b>&amp;</b> "quoted" {{ braces }}<|im_end|>']


@pytest.mark.parametrize("where", ["file", "config", "named"])
def test_the_template_stands_in_its_file_or_in_the_configuration(tmp_path: Path, where: str) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": CHATML}]
    config = {"file": {"chat_template": "no"}, "config": {"chat_template": CHATML}, "named": {"chat_template": named}}
    tokenizer = chat_tokenizer(tmp_path, CHATML if where == "file" else None, **config[where])
    assert learnt(tokenizer, CONVERSATIONS[0]) == ["4<|im_end|>"]


def test_templates_have_the_functions_of_transformers_and_one_day(tmp_path: Path) -> None:
    template = (
        "{{ strftime_now('%d %b %Y') }} {{ messages[0] | tojson }} {{ eos_token }}{{ pad_token }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}"
        "{% generation %}{{ messages[1]['content'] }}{% endgeneration %}"
    )
    template = read_template(chat_tokenizer(tmp_path, template), where="here")
    rendered = template.render([{"role": "user", "content": "<é>"}, CONVERSATIONS[0][1]], where="here")
    assert rendered.text == '26 Jul 2024 {"role": "user", "content": "<é>"} <|endoftext|>4'
    assert rendered.spans == ((len(rendered.text) - 1, len(rendered.text)),)


LAST_IS_SPECIAL = (
    "{% for m in messages %}{{ m.role }}: {% if loop.last %}(last) {% endif %}{{ m.content }}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            None,
            r"here is a conversation, but the tokenizer '.*' has no chat template; needed is a chat_template\.jinja",
        ),
        ("{% for %}", r"the chat template of the tokenizer '.*' is no Jinja template: "),
        ("{{ raise_exception('roles must alternate') }}", r"here: the chat template of .* fails: roles must alternate"),
        ("{{ messages[0].content + 3 }}", r"here: the chat template of .* fails: can only concatenate str"),
        ("{{ ''.__class__.mro() }}", r"here: the chat template of .* fails: access to attribute '__class__'"),
        (
            LAST_IS_SPECIAL,
            r"here: the chat template .* message 3 can't be told from the rest; needed .*generation %} tags",
        ),
        (
            "{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}",
            r"here: generated parts lie within",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_named(tmp_path: Path, template: str | None, message: str) -> None:
    tokenizer = chat_tokenizer(tmp_path, template)
    with pytest.raises(DataError, match=message):
        read_template(tokenizer, where="here").render(CONVERSATIONS[1], where="here")


# Rows


def turns(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def prepare(folder: Path, *records: dict[str, Any], seq_len: int, **options: Any) -> TokenDataset:
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = chat_tokenizer(folder / "tokenizer", PREFIXES)
    packing = Packing(seq_len, 0.3, **options)
    return prepare_dataset(read_corpus([str(folder / "a.jsonl")]), tokenizer, packing=packing, cache=folder / "cache")


def all_rows(dataset: TokenDataset) -> Rows:
    reader = dataset.open()
    train, heldout = (part.rows(range(part.part.num_rows)) for part in (reader.train, reader.heldout))
    parts = [(train.tokens, heldout.tokens), (train.flags, heldout.flags)]
    return Rows(*map(np.concatenate, parts), restarts=train.restarts)


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def test_conversations_lie_whole_in_rows_in_the_order_of_their_digests(tmp_path: Path) -> None:
    """Each is 'u:X;a:YY;' of 9 or more tokens; a row has 24."""
    records = [turns(letter, letter * (1 + 7 * n % 8)) for n, letter in enumerate(LETTERS)]
    dataset = prepare(tmp_path, *records, seq_len=23)
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", PREFIXES)
    rows = all_rows(dataset)
    found = []
    for tokens, flags, targets in zip(rows.tokens, rows.flags, rows.targets, strict=True):
        starts = np.flatnonzero(flags & 2)
        assert starts[0] == 0
        for start, end in zip(starts, [*starts[1:], 24], strict=True):
            if tokens[start] == tokenizer.eos_id:
                assert end == 24
                assert (tokens[start:] == tokenizer.eos_id).all()
                assert (targets[start - 1 :] == IGNORE).all()
                continue
            text = tokenizer.decode(tokens[start:end])
            found.append(text)
            answer = text.partition("a:")[2]
            kept = targets[start : end - 1][targets[start : end - 1] != IGNORE]
            assert tokenizer.decode(kept) == answer
    assert sorted(found) == sorted(f"u:{r['messages'][0]['content']};a:{r['messages'][1]['content']};" for r in records)
    content = dataset.train.stream.content
    assert (content.num_documents, content.num_cut, content.num_dropped) == (36, 0, 0)
    assert content.num_padding == int((rows.tokens == tokenizer.eos_id).sum())


def test_what_is_too_long_is_cut_at_its_end_and_left_out_if_nothing_is_left_to_learn(tmp_path: Path) -> None:
    records = [turns("q", "x" * 40), turns("y" * 40, "z"), turns("p", "short"), turns("q", "short")]
    dataset = prepare(tmp_path, *records, seq_len=15)
    content = dataset.train.stream.content
    assert (content.num_documents, content.num_cut, content.num_dropped) == (3, 1, 1)
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", PREFIXES)
    texts = [tokenizer.decode(row) for row in all_rows(dataset).tokens]
    assert "u:q;a:" + "x" * 10 in texts
    assert not any("y" in text or "z" in text for text in texts)


def test_rows_depend_on_their_length_and_are_kept_for_each(tmp_path: Path) -> None:
    records = [turns(letter, letter) for letter in LETTERS]
    datasets = [prepare(tmp_path, *records, seq_len=seq_len) for seq_len in (15, 31, 15)]
    assert datasets[0] == datasets[2]
    assert datasets[0].train.stream.fingerprint != datasets[1].train.stream.fingerprint
    assert len(list((tmp_path / "cache").glob("*.tokens"))) == 2


def test_another_template_is_another_stream(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(turns(letter, letter)) + "\n" for letter in LETTERS))
    streams = [
        prepare_dataset(
            read_corpus([str(tmp_path / "a.jsonl")]),
            chat_tokenizer(tmp_path / str(number), template),
            packing=Packing(63, 0.3),
            cache=tmp_path / "cache",
        ).train.stream
        for number, template in enumerate([PREFIXES, CHATML, PREFIXES])
    ]
    assert streams[0] == streams[2]
    assert streams[0].fingerprint != streams[1].fingerprint


def test_a_corpus_is_of_texts_or_of_conversations(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: a text in a corpus that begins with conversations"):
        prepare(tmp_path, turns("a", "b"), {"text": "c"}, seq_len=8)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: a conversation in a corpus that begins with texts"):
        prepare(tmp_path, {"text": "c"}, turns("a", "b"), seq_len=8)
    (tmp_path / "b.txt").write_text("plain")
    corpus = read_corpus([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")])
    (tmp_path / "a.jsonl").write_text(json.dumps(turns("a", "b")))
    corpus = read_corpus([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")])
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", PREFIXES)
    with pytest.raises(DataError, match=r"the corpus has conversations and texts, as .*b\.txt"):
        prepare_dataset(corpus, tokenizer, packing=Packing(8, 0.5), cache=tmp_path / "cache")


def test_too_few_conversations_are_counted(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"too short: 1 conversations found, and 1 of which .* fill 1 rows, 2 needed"):
        prepare(tmp_path, turns("a", "b"), turns("c" * 50, "d"), seq_len=15)
