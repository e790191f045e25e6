"""Read a model's `config.json`: what it is made of, without loading torch or transformers."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from uneven.errors import ModelError
from uneven.layout import ModelStructure
from uneven.modelspec.families import BY_PLAN, FAMILIES
from uneven.modelspec.settings import Settings
from uneven.modelspec.stored import WEIGHTS, WEIGHTS_INDEX
from uneven.modelspec.structure import ExpertDivision, build_structure

DEFAULT_MODEL = Path(__file__).parent.parent / "presets" / "llama-1m" / "config.json"

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
RANDOM = re.compile("dropout|pdrop|layerdrop|jitter")
"""Keys of what would draw other random numbers on each device; a classifier's dropout is not used here."""
WRAPPED = MappingProxyType(
    {"gemma3": "; of a model with images only the text part, 'gemma3_text', is one"},
)
OTHER_WEIGHTS = re.compile(r"\.(bin|pt|pth|gguf|h5|msgpack|safetensors)(\.index\.json)?$")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model by its configuration: the parsed `config.json`, and the structure derived from it."""

    config: Mapping[str, Any]
    structure: ModelStructure

    @property
    def family(self) -> str:
        return self.structure.family

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def max_positions(self) -> int | None:
        """The longest sequence, in tokens, that the model allows; None if its configuration does not say."""
        value = self.config.get("max_position_embeddings")
        return None if value is None else int(value)

    @property
    def init_std(self) -> float:
        """Standard deviation of random weights."""
        return float(self.config.get("initializer_range", 0.02))

    @property
    def pad_token_id(self) -> int | None:
        value: int | None = self._settings.get("pad_token_id")
        return value

    @property
    def _settings(self) -> Settings:
        family = FAMILIES.get(self.family)
        return Settings(self.config, family.defaults if family else {}, "config.json")


ByPlan = Callable[[Mapping[str, Any]], tuple[Mapping[str, Any], ModelStructure]]
"""From a parsed `config.json` to the same with all defaults, and the structure that transformers' own plan gives."""


def parse_model(
    config: Mapping[str, Any],
    *,
    where: str = "config.json",
    experts: ExpertDivision | None = None,
    by_plan: ByPlan | None = None,
) -> ModelSpec:
    """The model of a parsed `config.json`; `experts` says how those of a mixture are divided.

    `by_plan` reads the families of BY_PLAN, which takes torch (`uneven.parallel.describe_config`). Raises ModelError
    for a family or a feature that is not understood, by name.
    """
    name = str(config.get("model_type"))
    if name in FAMILIES:
        settings = Settings(config, FAMILIES[name].defaults, where)
        structure = build_structure(name, FAMILIES[name], settings=settings, experts=experts)
    elif name in BY_PLAN and by_plan is not None:
        config, structure = by_plan(config)
        settings = Settings(config, {}, where)
    else:
        raise ModelError(
            f"{where}: the family {name!r} is not understood (its attention, projections and norms have no entry in "
            f"the table of families{WRAPPED.get(name, '')}); supported are {', '.join([*FAMILIES, *BY_PLAN])}"
        )
    _refuse(settings)
    return ModelSpec(dict(config), structure)


def read_model(path: Path, *, experts: ExpertDivision | None = None, by_plan: ByPlan | None = None) -> ModelSpec:
    """The model of a `config.json`, or of the folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if (path / "adapter_config.json").is_file():
            raise ModelError(f"model: {path} holds an adapter without its model; merge it into the model first")
        raise ModelError(f"model: expected a config.json or a folder that holds one, found nothing at {file}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file}: expected a JSON object, found {type(config).__name__}")
    return parse_model(config, where=str(file), experts=experts, by_plan=by_plan)


def find_weights(model: Path) -> Path | None:
    """The folder whose safetensors a model starts from; None for a `config.json`, or a folder with nothing but one.

    Raises ModelError for a folder with weights of another format, or of a model whose weights are missing.
    """
    if not model.is_dir():
        return None
    if (model / WEIGHTS_INDEX).is_file() or (model / WEIGHTS).is_file():
        return model
    names = sorted(file.name for file in model.iterdir() if not file.name.startswith("."))
    others = [name for name in names if OTHER_WEIGHTS.search(name)]
    if others:
        raise ModelError(f"{model}: expected weights in {WEIGHTS} or {WEIGHTS_INDEX}, found {others[0]}")
    beside = [name for name in names if name != "config.json"]
    if beside:
        raise ModelError(
            f"{model}: the weights are missing: expected {WEIGHTS} or {WEIGHTS_INDEX} beside {beside[0]}; for random "
            f"weights give {model / 'config.json'} itself"
        )
    return None


def _refuse(settings: Settings) -> None:
    """Features inside a known family that would give a silent wrong answer, and values of a wrong kind."""
    where = settings.where
    if settings.get("quantization_config"):
        raise ModelError(f"{where}: quantization_config is set; training needs plain floating-point weights")
    for key, value in settings.config.items():
        if RANDOM.search(key) and not key.startswith("classifier") and value:
            raise ModelError(f"{where}: {key} is {value}; only 0 is supported, set it to 0.0")
    if settings.get("use_bidirectional_attention"):
        raise ModelError(f"{where}: use_bidirectional_attention is set; only causal attention is supported")
    if (settings.get("pretraining_tp") or 1) != 1:
        raise ModelError(f"{where}: pretraining_tp is {settings.get('pretraining_tp')}; only 1 is supported")
    for key in ("rope_parameters", "rope_scaling"):
        _check_rope(settings.get(key) or {}, where=where)
    _require_positive(settings.config.get("rope_theta", 1.0), "rope_theta", where=where)
    std = settings.config.get("initializer_range", 0.02)
    if not isinstance(std, int | float) or not 0 <= std < math.inf:
        raise ModelError(f"{where}: initializer_range must be a number of at least 0, found {std!r}")
    for key, least, most in (
        ("max_position_embeddings", 1, None),
        ("pad_token_id", 0, settings.size("vocab_size") - 1),
    ):
        value = settings.get(key)
        if value is None:
            continue
        if type(value) is not int or value < least or (most is not None and value > most):
            limit = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ModelError(f"{where}: {key} must be null or a whole number {limit}, found {value!r}")


def _check_rope(rope: Any, *, where: str) -> None:
    """Rotary settings, which some families give for each type of layer."""
    if isinstance(rope, dict) and rope and all(isinstance(value, dict | None) for value in rope.values()):
        for each in rope.values():
            _check_rope(each or {}, where=where)
        return
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    # The frequencies of others depend on the lengths seen so far, which is state outside of the step.
    if kind not in ROPE_TYPES:
        raise ModelError(f"{where}: rope type {kind!r} is not understood; use default, linear, llama3 or yarn")
    _require_positive(rope.get("rope_theta", 1.0) if isinstance(rope, dict) else 1.0, "rope_theta", where=where)


def _require_positive(value: Any, key: str, *, where: str) -> None:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{where}: {key} must be a number above 0, found {value!r}")
