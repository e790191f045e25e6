"""From a TOML file, flags and `key=value` pairs to one checked configuration; errors name key, value and place."""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from uneven.config.train import TrainConfig
from uneven.errors import ConfigError


def load_config(
    file: Path | None, *, settings: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The configuration of `file`, changed by `settings` ("key=value", dotted keys) and then by `flags`.

    `file` is TOML, or the JSON that a run leaves in its folder. Flags of the division replace the file's division as
    a whole. Relative paths are relative to where the command runs. Raises ConfigError.
    """
    values = _read(file) if file is not None else {}
    _refuse_unknown(values, where=str(file))
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    if any(key.startswith("parallel.") for key in given):
        experts = values.pop("parallel", {}).get("experts")  # of which no flag of the division says anything
        values["parallel"] = {} if experts is None else {"experts": experts}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {setting}: expected key=value, for example --set train.steps=100")
        change: dict[str, Any] = {}
        _put(change, key=key.strip(), value=_parse(text.strip()))
        _refuse_unknown(change, where=f"--set {setting}")
        _merge(values, change)
    for key, value in given.items():
        _put(values, key=key, value=value)
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def parse_degrees(text: str) -> list[int]:
    """ "4,3" as [4, 3]: the number of devices of each replica."""
    try:
        degrees = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--replicas {text}: expected whole numbers, one for each replica, as in 4,3") from None
    if min(degrees) < 1:
        raise ConfigError(f"--replicas {text}: each replica needs at least 1 device, found {min(degrees)}")
    return degrees


def parse_shares(text: str) -> list[list[float]]:
    """ "2:1:1,1:1" as [[2, 1, 1], [1, 1]]: replicas divided by commas, devices by colons."""
    try:
        shares = [[float(part) for part in replica.split(":")] for replica in text.split(",")]
    except ValueError:
        raise ConfigError(f"--shares {text}: expected numbers as in 2:1:1,1:1, replicas divided by commas") from None
    for index, replica in enumerate(shares):
        for share in replica:
            if not 0 < share < float("inf"):
                raise ConfigError(
                    f"--shares {text}: replica {index} has share {share:g}; shares must be positive numbers"
                )
    return shares


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"config: expected a file, found {'a folder' if file.is_dir() else 'nothing'} at {file}")
    is_json = file.suffix == ".json"
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not {'JSON' if is_json else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(values).__name__}")
    return _without_nulls(values)


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that JSON leaves empty, for which TOML has no value."""
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


def _parse(text: str) -> Any:
    """A TOML value where the text is one; otherwise the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(values: dict[str, Any], *, key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value


def _merge(values: dict[str, Any], change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, dict):
            _merge(values.setdefault(key, {}), value)
        else:
            values[key] = value


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _refuse_unknown(values: Mapping[str, Any], *, where: str) -> None:
    known = list(_keys(TrainConfig))
    sections = {key.partition(".")[0] for key in known if "." in key}
    for key, value in values.items():
        if key in sections and not isinstance(value, dict):
            raise ConfigError(f"{where}: {key!r} is a section with keys of its own, found the value {value!r}")
        if key in sections:
            for name, item in value.items():
                if isinstance(item, dict):
                    raise ConfigError(f"{where}: '{key}.{name}' is a value without keys of its own, found {item!r}")
        found = [f"{key}.{name}" for name in value] if isinstance(value, dict) and value else [key]
        for name in found:
            if name not in known and name not in sections:
                nearest = max([*known, *sections], key=lambda candidate: _likeness(name, candidate))
                raise ConfigError(f"{where}: unknown key {name!r}; the nearest is {nearest!r}")


def _likeness(name: str, candidate: str) -> float:
    """How likely `candidate` was meant: by its last word, then by the whole."""
    last, whole = (
        difflib.SequenceMatcher(None, a, b).ratio()
        for a, b in ((name.rpartition(".")[2], candidate.rpartition(".")[2]), (name, candidate))
    )
    return 2 * last + whole


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"] if not (isinstance(part, str) and "[" in part))
        message = problem["msg"][0].lower() + problem["msg"][1:]
        lines.append(f"{key}: {message}, found {problem['input']!r}")
    return "\n".join(lines)
