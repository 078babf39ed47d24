"""Hardware descriptions as YAML: plain data only, every key once, written whole or not at all."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtune.errors import InputError
from kvtune.hardware.machine import VERSION, Hardware
from kvtune.traces.atomic import move

_KEY = "kvtune_hardware"
_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
}


def parse_hardware(data: Any, source: str = "hardware") -> Hardware:
    """A machine from plain data, as from YAML or JSON.

    Raises ``InputError`` naming ``source`` and the key for anything that the format does not allow, and for
    a version that this kvtune does not read.
    """
    if not isinstance(data, dict) or _KEY not in data:
        raise InputError(f"{source} is no hardware description: the key '{_KEY}' is missing")
    version = data[_KEY]
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InputError(f"{source}: '{_KEY}' must be a version number, not {_shown(version)}")
    if version > VERSION:
        message = f"{source} has hardware format {version}; this kvtune reads up to {VERSION}"
        raise InputError(message, "upgrade kvtune")
    try:
        # JSON is the one form in which strict types still take a list for a tuple.
        return Hardware.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise _refusal(error, source) from None
    except (TypeError, RecursionError):
        raise InputError(f"{source} holds more than keys, texts, numbers and lists") from None


def read_hardware(path: str | Path) -> Hardware:
    """Read a hardware file. Raises ``InputError`` in one sentence for whatever is wrong with it."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a hardware file", "name the YAML file in it")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no hardware file {path}", "'kvtune calibrate' writes one") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no hardware description: not UTF-8 text") from None
    try:
        _require_tree(yaml.compose(text, yaml.SafeLoader), str(path), set())
        data = yaml.safe_load(text)
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path} is not valid YAML: {_reason(error)}") from None
    return parse_hardware(data, str(path))


def to_yaml(hardware: Hardware) -> str:
    """The machine as YAML: same machine, same text; keys in the schema's order, what is unknown left out."""
    data = json.loads(hardware.model_dump_json(exclude_none=True))
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100)


def save_hardware(hardware: Hardware, path: str | Path, overwrite: bool = False) -> Path:
    """Write the machine atomically. ``InputError`` where ``path`` exists and ``overwrite`` is false.

    A folder at ``path`` is never replaced.
    """
    path = Path(path)
    check_target(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(to_yaml(hardware), encoding="utf-8", newline="\n")
        move(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def check_target(path: Path, overwrite: bool) -> None:
    """``InputError`` where a file cannot be written to ``path``, before anything is measured."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a file", "name a YAML file")
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists", "give another --out, or --overwrite to replace it")
    there = next(parent for parent in (*path.parents, Path()) if parent.exists())
    if not there.is_dir():
        raise InputError(f"{there} is not a folder")
    if not os.access(there, os.W_OK):
        raise InputError(f"the folder {there} cannot be written", "give another --out")


def _require_tree(node: yaml.Node | None, source: str, seen: set[int]) -> None:
    """Refuse aliases (files that grow when read) and repeated keys."""
    if node is None:
        return
    if id(node) in seen:
        line = node.start_mark.line + 1
        raise InputError(f"{source} is not valid YAML here: what line {line} holds is used twice (an alias)")
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise InputError(f"{source}: the key '{key}' appears twice")
        for key, value in node.value:
            _require_tree(key, source, seen)
            _require_tree(value, source, seen)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _require_tree(item, source, seen)


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem} (line {error.problem_mark.line + 1})"
    return " ".join(str(error).split())


def _refusal(error: ValidationError, source: str) -> InputError:
    """The first problem as one sentence; the hint suggests a key, or says how to write a number."""
    problem = error.errors(include_url=False)[0]
    path, value = ".".join(map(str, problem["loc"])), problem["input"]
    if problem["type"] == "missing":
        return InputError(f"{source}: the key '{path}' is missing")
    if problem["type"] == "extra_forbidden":
        return InputError(f"{source}: unknown key '{path}'", _suggestion(problem))
    if problem["type"] == "value_error":
        return InputError(f"{source}: {path}: {problem.get('ctx', {})['error']}")
    if problem["type"] in ("too_short", "string_too_short"):
        return InputError(f"{source}: '{path}' must not be empty")
    wanted = _WANTED.get(problem["type"]) or problem["msg"].removeprefix("Input should be ")
    return InputError(f"{source}: '{path}' must be {wanted}, not {_shown(value)}", _as_number(value))


def _suggestion(problem: ErrorDetails) -> str:
    *parents, key = problem["loc"]
    model: type[BaseModel] = Hardware
    for part in parents:
        if part in model.model_fields:
            model = _model_in(model.model_fields[str(part)].annotation) or model
    known = list(model.model_fields)
    close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for model in map(_model_in, get_args(annotation)) if model), None)


def _as_number(value: Any) -> str | None:
    """YAML reads 4e12 as text: say how to write it."""
    try:
        return f"write it as {yaml.safe_dump(float(value)).split()[0]}" if isinstance(value, str) else None
    except ValueError:
        return None


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "keys and values"
    return "nothing" if value is None else f"'{value}'" if isinstance(value, str) else str(value).lower()
