"""YAML as profiles use it: plain data only, every key once, no aliases."""

from __future__ import annotations

import math
from typing import Any

import yaml

from kvtune.errors import InputError


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses aliases (cycles, and files that grow when expanded) and repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"the alias *{event.anchor} is not allowed here", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key_node, _ in node.value:
            problem = None
            if not isinstance(key_node.value, str):
                problem = "a key must be text"
            elif key_node.value in seen:
                problem = f"the key '{key_node.value}' appears twice"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str, source: str) -> dict[str, Any]:
    """The mapping that ``text`` holds. ``source`` names the file in messages.

    Raises ``InputError`` for malformed or cyclic YAML, repeated keys, values other than plain data
    (dates, binary, NaN, infinities) and a top level that is not a mapping.
    """
    try:
        data = yaml.load(text, _Loader)
    except RecursionError:
        raise InputError(f"{source} is nested too deeply") from None
    except yaml.YAMLError as error:
        raise InputError(f"{source} is not valid YAML{_reason(error)}") from None
    except ValueError as error:
        raise InputError(f"{source} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{source} must hold keys and values, not {type_name(data)}")
    _require_plain(data, source, ())
    return data


def type_name(value: Any) -> str:
    """What a user would call the type of ``value``."""
    if value is None:
        return "nothing"
    names = {
        bool: "true/false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "keys",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def dotted(path: tuple[Any, ...]) -> str:
    """A key path as it is written in messages: ``policy.parameters.sink``."""
    return ".".join(str(part) for part in path)


def _reason(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return f": {' '.join(str(error).split())}"
    mark = error.problem_mark or error.context_mark
    line = f" (line {mark.line + 1})" if mark else ""
    parts = [error.context, error.problem] if (error.problem or "").startswith("but ") else [error.problem]
    return f": {' '.join(part for part in parts if part) or error.context}{line}"


def _require_plain(value: Any, source: str, path: tuple[Any, ...]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise InputError(f"{source}: the key '{dotted((*path, key))}' must be text")
            _require_plain(item, source, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _require_plain(item, source, (*path, index))
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{source}: '{dotted(path)}' must be a finite number, not {value}")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise InputError(f"{source}: '{dotted(path)}' must be plain text or a number, not {type_name(value)}")
