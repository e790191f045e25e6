"""Tokenizers: ids, round trips, what is saved, and what transformers makes of it."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from uneven.data import load_tokenizer
from uneven.errors import DataError

ODD_TEXTS = [
    "",
    "plain",
    "naïve café, 東京, Привет",
    "e\u0301 is not é",
    "😀👩‍👩‍👧 emoji",
    "tabs\tand\nnew\r\nlines\n\n\n  indented",
    "   leading and trailing   ",
    "\x00\x7f\u00a0\u00ad\ufeff\U0010ffff",
    "don't <|endoftext|> do that <|endoftext|>",
    "".join(map(chr, range(0x250))),
]
BYTE = load_tokenizer("byte")
SAMPLE = "the cat sat on the mat, the dog sat on the log. " * 8


def write_bpe(path: Path, *, special: tuple[str, ...] = ("<s>", "</s>")) -> Path:
    """A small trained byte-level BPE."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([SAMPLE], trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(str(path))
    return path


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_byte_ids_are_byte_values_and_256_ends_a_text() -> None:
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.source, tokenizer.vocab_size, tokenizer.eos_id) == ("byte", 257, 256)
    ids = tokenizer.encode("aé\n")
    assert ids.tolist() == [97, 195, 169, 10]
    assert ids.dtype == np.uint32


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_saved_byte_tokenizer_gives_equal_ids(tmp_path: Path, text: str) -> None:
    load_tokenizer("byte").save(tmp_path)
    saved = load_tokenizer(str(tmp_path))
    ids = load_tokenizer("byte").encode(text)
    assert saved.encode(text).tolist() == ids.tolist() == list(text.encode())
    assert saved.decode(ids) == load_tokenizer("byte").decode(ids) == text


@given(st.text())
def test_byte_ids_decode_to_the_text(text: str) -> None:
    assert BYTE.decode(BYTE.encode(text)) == text


def test_trained_tokenizer_has_uint32_ids_below_its_vocab_size(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_bpe(tmp_path / "tokenizer.json")))
    ids = tokenizer.encode(SAMPLE)
    assert ids.dtype == np.uint32
    assert len(ids) < len(SAMPLE) / 2
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == SAMPLE


def test_vocab_size_is_one_more_than_the_largest_id(tmp_path: Path) -> None:
    path = write_bpe(tmp_path / "tokenizer.json")
    stored = json.loads(path.read_text())
    stored["model"]["vocab"]["zz"] = 999
    write_json(path, stored)
    assert load_tokenizer(str(path)).vocab_size == 1000


@pytest.mark.parametrize("source", ["byte", "trained"])
def test_name_of_a_special_token_in_a_text_is_plain_text(tmp_path: Path, source: str) -> None:
    special = ("<|endoftext|>",)
    path = write_bpe(tmp_path / "tokenizer.json", special=special)
    tokenizer = load_tokenizer("byte" if source == "byte" else str(path))
    for ids in (tokenizer.encode("a<|endoftext|>b"), *tokenizer.encode_batch(["<|endoftext|>"])):
        assert tokenizer.eos_id not in ids.tolist()
    assert tokenizer.decode([tokenizer.eos_id or 0]) == "<|endoftext|>"


def test_batch_gives_what_single_texts_give(tmp_path: Path) -> None:
    for tokenizer in (load_tokenizer("byte"), load_tokenizer(str(write_bpe(tmp_path / "t.json")))):
        batch = tokenizer.encode_batch(ODD_TEXTS)
        assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in ODD_TEXTS]
        assert tokenizer.encode_batch([]) == []


def test_stored_truncation_and_padding_do_not_touch_the_ids(tmp_path: Path) -> None:
    path = write_bpe(tmp_path / "tokenizer.json")
    plain = load_tokenizer(str(path)).encode_batch(["the cat", SAMPLE])
    stored = tokenizers.Tokenizer.from_file(str(path))
    stored.enable_truncation(4)
    stored.enable_padding(length=16)
    stored.save(str(path))
    batch = load_tokenizer(str(path)).encode_batch(["the cat", SAMPLE])
    assert [ids.tolist() for ids in batch] == [ids.tolist() for ids in plain]


def test_broken_bytes_and_unknown_ids_decode_without_error() -> None:
    assert load_tokenizer("byte").decode([104, 255, 256, 999]) == "h\ufffd<|endoftext|>"
    assert load_tokenizer("byte").decode(np.array([], dtype=np.int64)) == ""


def test_lone_surrogate_is_refused_with_its_place(tmp_path: Path) -> None:
    for tokenizer in (load_tokenizer("byte"), load_tokenizer(str(write_bpe(tmp_path / "t.json")))):
        with pytest.raises(DataError, match=r"character 2 is '\\ud800', a lone surrogate"):
            tokenizer.encode("ab\ud800")


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|im_end|>", "<eos>", "<|end_of_text|>"])
def test_bare_file_ends_texts_with_a_usual_name(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(str(write_bpe(tmp_path / "t.json", special=("<pad>", "<s>", name))))
    assert tokenizer.eos_id == 2


def test_bare_file_without_a_usual_name_has_no_end_of_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_bpe(tmp_path / "t.json", special=("<stop>",))))
    assert tokenizer.eos_id is None
    tokenizer.save(tmp_path / "model")
    assert load_tokenizer(str(tmp_path / "model")).eos_id is None
    assert json.loads((tmp_path / "model/tokenizer_config.json").read_text())["eos_token"] is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "<b>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<b>", "lstrip": False}}),
        ("special_tokens_map.json", {"eos_token": {"content": "<b>"}}),
        ("generation_config.json", {"eos_token_id": 1}),
        ("generation_config.json", {"eos_token_id": [1, 0]}),
        ("config.json", {"eos_token_id": 1}),
    ],
)
def test_folder_says_what_ends_a_text(tmp_path: Path, name: str, content: object) -> None:
    write_bpe(tmp_path / "tokenizer.json", special=("</s>", "<b>"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": None})
    assert load_tokenizer(str(tmp_path)).eos_id == 0
    write_json(tmp_path / name, content)
    assert load_tokenizer(str(tmp_path)).eos_id == 1


def test_tokenizer_config_comes_before_the_other_files(tmp_path: Path) -> None:
    write_bpe(tmp_path / "tokenizer.json", special=("<a>", "<b>"))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<a>"})
    write_json(tmp_path / "config.json", {"eos_token_id": 1})
    assert load_tokenizer(str(tmp_path)).eos_id == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", {"eos_token": "<none>"}, r"eos_token is '<none>', which is not in the voc"),
        ("tokenizer_config.json", {"eos_token": 7}, r"eos_token is 7, which is not in the vocabulary"),
        ("config.json", {"eos_token_id": 5000}, r"eos_token_id is 5000, which is not in the vocabulary"),
        ("config.json", {"eos_token_id": -1}, r"eos_token_id is -1, which is not in the vocabulary"),
        ("config.json", [1], r"config\.json holds a JSON list; needed is an object"),
    ],
)
def test_wrong_end_of_text_is_refused(tmp_path: Path, name: str, content: object, message: str) -> None:
    write_bpe(tmp_path / "tokenizer.json")
    write_json(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path))


def test_folder_is_saved_with_its_files_even_when_it_is_gone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_bpe(source / "tokenizer.json")
    write_json(source / "tokenizer_config.json", {"eos_token": "</s>", "model_max_length": 77})
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "model.safetensors").write_bytes(b"weights")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    tokenizer = load_tokenizer(str(source))
    for path in source.iterdir():
        path.unlink()
    tokenizer.save(tmp_path / "new" / "model")
    after = {path.name: path.read_bytes() for path in (tmp_path / "new/model").iterdir()}
    del before["model.safetensors"]
    assert after == before
    assert json.loads((tmp_path / "new/model/tokenizer_config.json").read_text())["model_max_length"] == 77


def test_fingerprint_follows_what_decides_the_stream(tmp_path: Path) -> None:
    path = write_bpe(tmp_path / "a/tokenizer.json")
    bare = load_tokenizer(str(path)).fingerprint
    assert load_tokenizer(str(path.parent)).fingerprint == bare
    write_json(tmp_path / "a/tokenizer_config.json", {"eos_token": "<s>"})
    assert load_tokenizer(str(path.parent)).fingerprint != bare
    assert load_tokenizer("byte").fingerprint not in {bare, load_tokenizer(str(path.parent)).fingerprint}


def test_saved_tokenizer_keeps_its_fingerprint(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("byte")
    tokenizer.save(tmp_path)
    assert load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


def test_missing_source_is_named_with_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'.*gone': no such file or folder; needed is \"byte\", a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"the folder has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{broken", r"tokenizer\.json is not valid JSON: .*column 2"),
        (b'{"a": "\xff"}', r"tokenizer\.json is not valid JSON: 'utf-8' codec"),
        (b"[]", r"tokenizer\.json holds a JSON list; needed is an object"),
        (b"{}", r"can't load the tokenizer .*tokenizer\.json: "),
        (
            tokenizers.Tokenizer(models.BPE()).to_str().encode(),
            r"tokenizer\.json: its vocabulary has 0 tokens",
        ),
    ],
)
def test_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(str(tmp_path))


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"can't save the tokenizer byte in .*file"):
        load_tokenizer("byte").save(tmp_path / "file")


def test_a_folder_called_byte_is_reached_by_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bpe(tmp_path / "byte/tokenizer.json")
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("byte").vocab_size == 257
    assert load_tokenizer(os.path.join(".", "byte")).eos_id == 1
