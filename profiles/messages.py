"""A failed validation as one sentence that names the key path."""

from __future__ import annotations

import difflib
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtune.errors import InputError
from kvtune.profiles.strict_yaml import dotted, type_name

_TAGS = {"function", "value"}

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "int_parsing": "a whole number",
}

_BOUNDS = {
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
}


def explain(error: ValidationError, source: str, root: type[BaseModel]) -> InputError:
    """The first problem of ``error`` as an ``InputError``; the hint suggests a key or counts the others."""
    problems = error.errors(include_url=False)
    first = problems[0]
    more = len(problems) - 1
    count = f"{more} more {'problem' if more == 1 else 'problems'} after this one" if more else None
    hint = _suggestion(first, root) or _number_as_text(first) or count
    return InputError(f"{source}: {_sentence(first)}", hint)


def _sentence(problem: ErrorDetails) -> str:
    path = dotted(_path(problem))
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "missing":
        return f"the key '{path}' is missing"
    if kind == "extra_forbidden":
        return f"unknown key '{path}'"
    where = f"'{path}' " if path else ""
    if kind in _WANTED:
        return f"{where}must be {_WANTED[kind]}, not {_shown(value)}"
    if kind == "value_error":
        return f"{f'{path}: ' if path else ''}{context['error']}"
    if kind in _BOUNDS:
        key, word = _BOUNDS[kind]
        return f"{where}must be {word} {context[key]:g}, not {_shown(value)}"
    if kind == "string_too_short":
        return f"{where}must not be empty"
    text = problem["msg"].removeprefix("Input should be ")
    return f"{where}must be {text}, not {_shown(value)}"


def _path(problem: ErrorDetails) -> tuple[Any, ...]:
    return tuple(part for part in problem["loc"] if part not in _TAGS and part != "[key]")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list) or value is None:
        return type_name(value)
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


def _suggestion(problem: ErrorDetails, root: type[BaseModel]) -> str | None:
    if problem["type"] != "extra_forbidden":
        return None
    *parents, key = _path(problem)
    model: Any = root
    for part in parents:
        fields = getattr(model, "model_fields", {})
        if part in fields:
            model = _model_in(fields[part].annotation) or model
    close = difflib.get_close_matches(str(key), list(model.model_fields), n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(model.model_fields)}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The profile part that a field's annotation holds, however wrapped."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(part) for part in get_args(annotation))
    return next((model for model in found if model), None)


def _number_as_text(problem: ErrorDetails) -> str | None:
    """YAML reads 1e-3 as text: say how to write it."""
    value = problem["input"]
    if problem["type"] != "float_type" or not isinstance(value, str):
        return None
    try:
        return f"write it as {yaml.safe_dump(float(value)).split()[0]}, without quotes"
    except ValueError:
        return None
