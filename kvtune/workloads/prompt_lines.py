"""One line of a prompt file, checked: what it must hold, and which sentence says that it does not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvtune.errors import InputError, unknown

_FORMS = '{"prompt"}, {"messages", "reference"} or {"context", "requests"}'
_ROLES = ("system", "user", "assistant")

Exchange = tuple[str, str | None]  # question, reference


@dataclass(frozen=True)
class RawPrompt:
    text: str
    reference: str | None


@dataclass(frozen=True)
class ChatPrompt:
    messages: tuple[dict[str, str], ...]
    reference: str | None


@dataclass(frozen=True)
class ContextPrompt:
    context: str
    requests: tuple[tuple[Exchange, ...], ...]


Prompt = RawPrompt | ChatPrompt | ContextPrompt


def parse_line(line: str, where: str) -> Prompt:
    """The prompt on a JSON line; ``where`` (file and line number) begins every error's sentence.

    Raises ``InputError`` for anything but one of the three forms, a missing or unknown key included.
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{where} is not valid JSON: {reason}") from None
    if not isinstance(entry, dict):
        raise InputError(f"{where} must be a JSON object", f"one of {_FORMS}")
    forms = [form for form in ("prompt", "messages", "context") if form in entry]
    if len(forms) != 1:
        found = "none" if not forms else " and ".join(f"'{form}'" for form in forms)
        raise InputError(
            f"{where} must have one of 'prompt', 'messages' or 'context', it has {found}", f"one of {_FORMS}"
        )
    if forms == ["prompt"]:
        _known_keys(entry, ("prompt", "reference"), where)
        return RawPrompt(_text(entry, "prompt", where), _reference(entry, where))
    if forms == ["messages"]:
        _known_keys(entry, ("messages", "reference"), where)
        return ChatPrompt(_messages(entry["messages"], where), _reference(entry, where))
    _known_keys(entry, ("context", "requests"), where)
    requests = _items(entry, "requests", where)
    return ContextPrompt(
        _text(entry, "context", where),
        tuple(_request(request, f"{where}, request {i}") for i, request in enumerate(requests, start=1)),
    )


def _request(request: Any, where: str) -> tuple[Exchange, ...]:
    _known_keys(request, ("turns",), where)
    turns = _items(request, "turns", where)
    return tuple(_exchange(turn, f"{where}, turn {i}") for i, turn in enumerate(turns, start=1))


def _exchange(turn: Any, where: str) -> Exchange:
    _known_keys(turn, ("question", "reference"), where)
    return _text(turn, "question", where), _reference(turn, where)


def _messages(messages: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: 'messages' must be a list with at least one message")
    for i, message in enumerate(messages, start=1):
        at = f"{where}, message {i}"
        _known_keys(message, ("role", "content"), at)
        _text(message, "content", at)
        if message.get("role") not in _ROLES:
            raise InputError(f"{at}: 'role' must be one of {', '.join(_ROLES)}")
    if messages[-1]["role"] != "user":
        raise InputError(
            f"{where}: the last message must be the user's", "give the assistant's answer as 'reference'"
        )
    return tuple(messages)


def _known_keys(entry: Any, known: Iterable[str], where: str) -> None:
    if not isinstance(entry, dict):
        raise InputError(f"{where} must be a JSON object")
    for key in entry:
        if key not in known:
            error = unknown("key", key, known)
            raise InputError(f"{where}: {error.message}", error.hint)


def _items(entry: dict[str, Any], key: str, where: str) -> list[Any]:
    items = entry.get(key)
    if not isinstance(items, list) or not items:
        raise InputError(f"{where}: '{key}' must be a list with at least one entry")
    return items


def _text(entry: dict[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where}: '{key}' must be a text that is not empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{where}: '{key}' holds half of a surrogate pair, which is no character") from None
    return value


def _reference(entry: dict[str, Any], where: str) -> str | None:
    return None if entry.get("reference") is None else _text(entry, "reference", where)
