"""Reading `config.json`: fields with their types and ranges, every message naming the file and the key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_config(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """config.json, generation_config.json (empty if absent) and the name that messages use for the former."""
    if isinstance(source, Mapping):
        return source, {}, "config"
    path = Path(source) / "config.json"
    generation = Path(source) / "generation_config.json"
    return _read_json(path), _read_json(generation) if generation.is_file() else {}, str(path)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a model directory must contain config.json.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object.")
    return content


def architecture_of(raw: Mapping[str, Any], where: str, known: tuple[str, ...]) -> str:
    """The checkpoint's one architecture. Raises ValueError where it is none of the known."""
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"{where}: architectures must name one architecture, got {names!r}.")
    if names[0] not in known:
        raise ValueError(
            f"{where}: architecture '{names[0]}' is not supported by this version; supported: {', '.join(known)}."
        )
    return str(names[0])


def refuse_common(raw: Mapping[str, Any], where: str) -> None:
    """Features of a decoder that change its outputs and that no model here implements."""
    if raw.get("quantization_config"):
        raise ValueError(
            f"{where}: quantization_config is not supported by this version; use bfloat16 or float32 weights."
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act '{raw['hidden_act']}' is not supported by this version; only 'silu' is.")


def present(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are not null."""
    return {key: value for key, value in raw.items() if value is not None}


def integer(raw: Mapping[str, Any], key: str, where: str, least: int) -> int:
    """raw[key]. Raises ValueError where it is missing, no integer or below `least`."""
    value = raw.get(key)
    if value is None:
        raise ValueError(f"{where}: {key} is missing.")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where}: {key} must be an integer >= {least}, got {value!r}.")
    return value


def number(value: object, key: str, where: str) -> float:
    """The value of `key` as a float. Raises ValueError where it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {key} must be a number, got {value!r}.")
    return float(value)
