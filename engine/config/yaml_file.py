"""YAML files that a person writes: what cannot be read is said with its line, and nothing is dropped silently."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

_MAX_SHOWN_CHARS = 80


def read_yaml(path: Path) -> Any:
    """The file's content as plain values; None for an empty file.

    Raises:
        ValueError: what is wrong and where ("line 1, column 9: not valid YAML: ..."), without the path.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("not valid YAML: it is not UTF-8 text") from error
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise ValueError("not valid YAML: nested too deeply") from error


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would silently keep the last, and says where a value is
    that cannot be made."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # Each conversion fails in its own way: a 13th month, more digits than Python reads, `!!bool x`.
            text = f"{_shown(node.value)} cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, Any] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f'key "{key}" is given twice', key_node.start_mark)
            seen[key] = None
        return super().construct_mapping(node, deep)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."
