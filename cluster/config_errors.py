"""Turns pydantic's validation errors into one message a person can act on: every problem, with its path and the fix.

Knows models only by reflection; the schema itself is in `cluster.config`.
"""

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

_MAX_SHOWN_VALUE_LEN = 80


class ConfigError(ValueError):
    """A config file or section that cannot be used. `problems` holds one line per problem, path first."""

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.where = where
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{where}: {count}\n" + "\n".join(f"  {line}" for line in problems))


def section_of(annotation: object) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as `X`, `X | None` or `Annotated[X, ...]`; None for a leaf."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return section_of(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        sections = [found for arm in typing.get_args(annotation) if (found := section_of(arm)) is not None]
        return sections[0] if len(sections) == 1 else None
    return None


def leaf_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of every key of a schema, sections' keys after the section itself."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        section = section_of(field.annotation)
        if section is not None:
            yield from leaf_paths(section, f"{path}.")


def nearest_key(key: str, siblings: Sequence[str], everywhere: Sequence[str]) -> str | None:
    """What the writer of an unknown key most likely meant.

    A close spelling in the same section wins; otherwise a key of exactly or nearly that name in another section, given
    with its full path.
    """
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if close:
        return close[0]
    by_name = {path.rsplit(".", 1)[-1]: path for path in reversed(everywhere)}
    elsewhere = difflib.get_close_matches(key, list(by_name), n=1, cutoff=0.8)
    return by_name[elsewhere[0]] if elsewhere else None


def describe_problems(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[str]:
    """One line per problem of a failed validation of `model`; `prefix` is put before each path."""
    everywhere = list(leaf_paths(model))
    lines: list[str] = []
    for item in error.errors(include_url=False):
        line = _describe(item, model, everywhere, prefix)
        if line not in lines:  # the arms of a union repeat themselves
            lines.append(line)
    return lines


def _describe(item: Any, model: type[BaseModel], everywhere: Sequence[str], prefix: str) -> str:
    loc = tuple(part for part in item["loc"] if not _is_union_arm(part))
    path = prefix + _dotted(loc)
    if item["type"] == "extra_forbidden":
        siblings = _keys_at(model, loc[:-1])
        near = nearest_key(str(loc[-1]), siblings, everywhere)
        hint = f'did you mean "{near}"?' if near else f"known keys here: {', '.join(siblings)}"
        return f"{path}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{path}: required, but missing"
    message = item["msg"]
    if item["type"] in ("value_error", "assertion_error"):
        # Our own validators and those of the speculative section say everything there is to say.
        text = str(item.get("ctx", {}).get("error", message))
        if not path:
            return text  # a rule over several keys starts with their paths
        return f"{path}: {text.removeprefix(f'{loc[-1]}: ')}"  # the speculative section's rules name their key
    if item["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{path or 'the file'}: must be a section of keys, got {shown(item['input'])}"
    return f"{path}: {message[0].lower()}{message[1:]}, got {shown(item['input'])}"


def _keys_at(model: type[BaseModel], loc: Sequence[object]) -> list[str]:
    current: type[BaseModel] | None = model
    for part in loc:
        assert current is not None, loc
        field = current.model_fields.get(str(part))
        current = section_of(field.annotation) if field is not None else None
    return list(current.model_fields) if current is not None else []


def _dotted(loc: Sequence[object]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def _is_union_arm(part: object) -> bool:
    """Pydantic adds the tried arm ("int", "constrained-str", "function-after[...]") to the path; no key looks so."""
    return isinstance(part, str) and (part in ("int", "str", "float", "none", "bool") or "[" in part or "-" in part)


def shown(value: object) -> str:
    """A value in a message, cut short."""
    if isinstance(value, Mapping):
        return "a section"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_VALUE_LEN else text[: _MAX_SHOWN_VALUE_LEN - 3] + "..."
