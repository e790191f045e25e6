"""Headers of safetensors files: what they say, and how damage is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.weight_files import write_shards, write_weights
from uneven.errors import ModelError
from uneven.modelspec import StoredTensor, read_stored

SHAPES = {"a.weight": (3, 2), "b.weight": (4,), "c.weight": (1, 5)}


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_stored(folder)
    return str(caught.value)


def test_a_file_says_where_its_tensors_are(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, SHAPES, dtype="BF16", dtypes={"b.weight": "F32"})
    stored = read_stored(tmp_path)
    start = stored.header_bytes
    assert start == file.stat().st_size - 12 - 16 - 10
    assert stored.where == file
    assert stored.tensors == {
        "a.weight": StoredTensor(file, "BF16", (3, 2), start, 12),
        "b.weight": StoredTensor(file, "F32", (4,), start + 12, 16),
        "c.weight": StoredTensor(file, "BF16", (1, 5), start + 28, 10),
    }


def test_several_files_are_read_by_their_index(tmp_path: Path) -> None:
    index = write_shards(tmp_path, SHAPES)
    stored = read_stored(tmp_path)
    assert stored.where == index
    assert {name: tensor.file.name for name, tensor in stored.tensors.items()} == {
        "a.weight": "model-0.safetensors",
        "b.weight": "model-1.safetensors",
        "c.weight": "model-0.safetensors",
    }
    data = sum(tensor.num_bytes for tensor in stored.tensors.values())
    assert stored.header_bytes == sum(file.stat().st_size for file in tmp_path.iterdir()) - data


def test_a_single_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    write_shards(tmp_path, SHAPES)
    write_weights(tmp_path / "model.safetensors", {"d": (1,)})
    assert list(read_stored(tmp_path).tensors) == ["d"]


@pytest.mark.parametrize("length", [0, 5, 8, 40, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, length: int) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, SHAPES)
    file.write_bytes(file.read_bytes()[:length])
    assert str(file) in refusal(tmp_path)
    assert "the file is damaged" in refusal(tmp_path)


def test_a_file_that_is_too_long_is_refused_with_both_sizes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, {"a": (250,)})
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"x")
    assert f"{file}: has {size + 1:,} bytes, its header describes {size:,}" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ([], "malformed entry of a"),
        ({"dtype": "F32", "shape": [2]}, "malformed entry of a"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}, "malformed entry of a"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "malformed entry of a"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "malformed entry of a"),
        ({"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}, "malformed entry of a"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}, "malformed entry of a"),
    ],
)
def test_an_entry_that_makes_no_sense_is_named(tmp_path: Path, entry: Any, text: str) -> None:
    content = json.dumps({"a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    assert text in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{" + bytes(50), "a header of 123 bytes"),
        ((4).to_bytes(8, "little") + b"[[[[", "not JSON"),
        ((4).to_bytes(8, "little") + b"[  ]", "JSON list"),
        (b"\xff" * 20, "too long"),
    ],
)
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert text in refusal(tmp_path).replace("has 43 of 123 bytes", "a header of 123 bytes")


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, SHAPES)
    (tmp_path / "model-1.safetensors").unlink()
    assert refusal(tmp_path) == f"{tmp_path / 'model-1.safetensors'}: can't read weights: No such file or directory"


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, SHAPES)
    write_weights(tmp_path / "model-0.safetensors", {"a.weight": (3, 2)})
    assert "places c.weight in model-0.safetensors, which holds no such tensor" in refusal(tmp_path)


@pytest.mark.parametrize("place", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", 3])
def test_an_index_may_name_files_of_its_own_folder_only(tmp_path: Path, place: Any) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": place}}))
    assert refusal(tmp_path) == f"{index}: expected the name of a file in the same folder, found {place!r}"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}', "\xff"])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    assert "malformed index" in refusal(tmp_path)
