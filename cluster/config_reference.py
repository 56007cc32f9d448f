"""The config schema as data for people: one row per key, used by `dflash config schema` and configs/README.md."""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config import LIVE_SPECULATIVE_KEYS, ClusterConfig
from cluster.config_errors import section_of


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyReference:
    """One key. `applies` says whether a running application takes a change over or replicas must restart."""

    path: str
    type: str
    default: str
    applies: Literal["restart", "live"]
    description: str


def keys() -> list[KeyReference]:
    """Every key that holds a value, in the order of the schema; sections themselves are left out."""
    return list(_walk(ClusterConfig, ""))


def markdown_table() -> str:
    """The keys as a Markdown table."""
    lines = ["| key | type | default | change | meaning |", "|---|---|---|---|---|"]
    for key in keys():
        cells = (f"`{key.path}`", key.type, f"`{key.default}`", key.applies, key.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def json_schema() -> dict[str, Any]:
    """JSON schema of the config file for editors; every key carries `applies`."""
    schema = ClusterConfig.model_json_schema(mode="validation")
    speculative = next(definition for name, definition in schema["$defs"].items() if name == "DFlashDecodingConfig")
    for name, key in speculative["properties"].items():
        key["applies"] = _speculative_applies(name)
    return schema


def _walk(model: type[BaseModel], prefix: str) -> Iterator[KeyReference]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        section = section_of(field.annotation)
        if section is not None:
            yield from _walk(section, f"{path}.")
            continue
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        speculative = prefix == "speculative_config."
        yield KeyReference(
            path=path,
            type=_type_name(field.annotation),
            default=_default(field),
            applies=_speculative_applies(name)
            if speculative
            else ("live" if extra["applies"] == "live" else "restart"),
            description=field.description or "",
        )


def _speculative_applies(name: str) -> Literal["restart", "live"]:
    return "live" if name in LIVE_SPECULATIVE_KEYS else "restart"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value.value) if isinstance(value, Enum) else str(value)


def _type_name(annotation: object) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(str(value) for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(arm) for arm in typing.get_args(annotation))
    if annotation is type(None):
        return "null"
    if origin is not None:
        arms = [arm for arm in typing.get_args(annotation) if arm is not ...]
        return f"{origin.__name__} of {' to '.join(_type_name(arm) for arm in arms)}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(str(member.value) for member in annotation)
    return getattr(annotation, "__name__", str(annotation))
