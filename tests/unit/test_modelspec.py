"""Models by their `config.json`: what is refused, and how it is said."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests import models
from uneven.errors import ModelError
from uneven.modelspec import DEFAULT_MODEL, find_weights, parse_model, read_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 100,
}


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as caught:
        parse_model(config, where="some/config.json")
    return str(caught.value)


@pytest.mark.parametrize("family", ["gpt2", "mamba", "gemma3", "seed_oss", "Llama", None, 3])
def test_a_family_that_is_not_understood_is_refused_by_name(family: Any) -> None:
    message = refusal(LLAMA | {"model_type": family})
    assert f"the family {str(family)!r} is not understood" in message
    assert message.startswith("some/config.json: ")
    assert "supported are llama, mistral, qwen2, qwen3" in message


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_missing_size_is_named(key: str) -> None:
    message = refusal({name: value for name, value in LLAMA.items() if name != key})
    assert message == f"some/config.json: {key} must be a whole number of at least 1, found None"


@pytest.mark.parametrize("value", [0, -1, 2.5, "48", True, [48], {}])
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "head_dim",
    ],
)
def test_a_size_that_is_no_size_is_refused_with_its_value(key: str, value: Any) -> None:
    message = refusal(LLAMA | {key: value})
    assert message == f"some/config.json: {key} must be a whole number of at least 1, found {value!r}"


def test_heads_that_are_no_multiple_of_key_value_heads_are_refused_with_the_file() -> None:
    message = refusal(LLAMA | {"num_key_value_heads": 4})
    assert "num_attention_heads 6 must be a multiple of num_key_value_heads 4" in message
    assert message.startswith("some/config.json: ")


def test_a_width_that_gives_no_whole_heads_is_refused() -> None:
    message = refusal({key: value for key, value in LLAMA.items() if key != "head_dim"} | {"hidden_size": 50})
    assert message == ("some/config.json: hidden_size 50 is not a multiple of num_attention_heads 6; set head_dim")


def test_an_odd_head_width_is_refused() -> None:
    """Rotary embeddings turn pairs of channels."""
    message = refusal(LLAMA | {"head_dim": 7})
    assert message.startswith("some/config.json: ")
    assert "head_dim" in message
    assert "7" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config is set; training needs plain floating-point weights",
        ),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1; only 0 is supported, set it to 0.0"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2; only 1 is supported"),
    ],
)
def test_features_that_would_give_wrong_answers_are_refused(change: dict[str, Any], message: str) -> None:
    assert refusal(LLAMA | change) == f"some/config.json: {message}"


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "made-up"])
def test_rope_types_that_are_not_understood_are_refused(key: str, name: str, kind: str) -> None:
    message = refusal(LLAMA | {key: {name: kind, "factor": 2.0}})
    assert message.startswith("some/config.json: ")
    assert f"rope type {kind!r} is not understood; use default, linear, llama3 or yarn" in message


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rope_types_without_state_are_taken(kind: str) -> None:
    assert parse_model(LLAMA | {"rope_parameters": {"rope_type": kind, "factor": 2.0}}).family == "llama"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tie_word_embeddings", "no"),
        ("attention_bias", "false"),
        ("mlp_bias", 3),
        ("initializer_range", "wide"),
        ("max_position_embeddings", "long"),
        ("pad_token_id", "none"),
    ],
)
def test_other_values_of_a_wrong_kind_are_refused(key: str, value: Any) -> None:
    """A text is true for Python, so that "false" would switch a feature on."""
    message = refusal(LLAMA | {key: value})
    assert message.startswith("some/config.json: ")
    assert key in message
    assert repr(value) in message


def test_settings_without_effect_are_taken() -> None:
    spec = parse_model(
        LLAMA | {"attention_dropout": 0.0, "pretraining_tp": 1, "quantization_config": None, "rope_scaling": None}
    )
    assert spec.structure == parse_model(LLAMA).structure


# Files


def test_a_model_is_read_from_its_file_or_its_folder(tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read_model(file) == read_model(tmp_path) == parse_model(LLAMA)


def test_a_model_that_is_not_there_is_refused_with_its_path(tmp_path) -> None:
    where = re.escape(str(tmp_path / "config.json"))
    with pytest.raises(
        ModelError, match=f"expected a config.json or a folder that holds one, found nothing at {where}"
    ):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"", "not JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object, found NoneType"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=["open", "no utf-8", "empty", "list", "null", "deep"],
)
def test_a_file_that_holds_no_object_is_refused(tmp_path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=re.escape(str(file)) + ".*" + message):
        read_model(file)


def test_an_error_names_the_file(tmp_path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"vocab_size": 0}))
    with pytest.raises(ModelError, match=re.escape(f"{file}: vocab_size must be a whole number")):
        read_model(tmp_path)


def test_the_default_model_is_described() -> None:
    spec = read_model(DEFAULT_MODEL)
    assert spec.family == "llama"
    assert 1_000_000 < spec.structure.num_parameters < 5_000_000
    assert spec.max_positions == 1024
    assert spec.vocab_size == 320
    assert spec.pad_token_id is None


@pytest.mark.parametrize(("size", "unit_size"), [(1, 1), (127, 1), (128, 2), (352, 4), (14336, 128), (152064, 128)])
def test_units_are_the_largest_blocks_that_leave_sixty_four(size: int, unit_size: int) -> None:
    axis = models.model_spec("llama", intermediate_size=size).structure.axes["model.layers.0.mlp"]
    assert axis.unit_size == unit_size


def test_reading_a_model_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from uneven.modelspec import read_model, DEFAULT_MODEL; read_model(DEFAULT_MODEL); "
        "sys.exit(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["tokenizer.json"], "the weights are missing.*tokenizer.json"),
        (["pytorch_model.bin.index.json"], "found pytorch_model.bin.index.json"),
        (["pytorch_model.bin"], "found pytorch_model.bin"),
        (["model-00001-of-00002.safetensors"], "found model-00001-of-00002.safetensors"),
    ],
)
def test_a_folder_of_a_model_whose_weights_are_missing_is_refused(tmp_path, files: list[str], named: str) -> None:
    """Training would else start from random weights, and nobody might notice."""
    for name in ("config.json", *files):
        (tmp_path / name).write_text(json.dumps(LLAMA))
    with pytest.raises(ModelError, match=f"{re.escape(str(tmp_path))}: .*{named}"):
        find_weights(tmp_path)


def test_a_configuration_alone_means_random_weights(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert find_weights(tmp_path) is None
    assert find_weights(tmp_path / "config.json") is None
