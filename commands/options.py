"""Options that mean the same in every command, and how their text is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtune.errors import InputError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the path that was written.")]
OutPath = Annotated[Path | None, typer.Option("--out", "-o", help="Folder (or file) to write.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or auto.")]
Layers = Annotated[str | None, typer.Option("--layers", help="Layers to use, like 0,5-8 (default: all).")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue what an interrupted run has left.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that exists.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A policy parameter (repeatable).")
]
Task = Annotated[str | None, typer.Option("--task", help="Task to make samples of (default: niah_single).")]
Prompts = Annotated[Path | None, typer.Option("--prompts", help="Your own prompts: a .txt or .jsonl file.")]
Context = Annotated[
    int | None, typer.Option("--context", help="Tokens of each context (default: the task's).")
]
Samples = Annotated[int | None, typer.Option("--samples", help="Contexts (default: 1, or all of --prompts).")]
Requests = Annotated[int, typer.Option("--requests", help="Requests over each context.")]
Turns = Annotated[int | None, typer.Option("--turns", help="Turns of each request (default: the task's).")]
RopeOption = Annotated[
    str | None, typer.Option("--rope", help="Rotary positions: yarn:4, linear:2, ntk:4, dynamic:4.")
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="float32, bfloat16, float16, or auto (float32 on a CPU).")
]


def parse_layers(text: str | None, n_layers: int) -> list[int]:
    """Layers named by ``text`` (``0,5-8``; ``None``: all), ascending, each once.

    Raises ``InputError`` where the text cannot be read or names a layer outside 0…n_layers-1.
    """
    return parse_indices(text, n_layers, "--layers", "layer")


def parse_indices(text: str | None, count: int, option: str, what: str) -> list[int]:
    """Like :func:`parse_layers`, for anything numbered 0…count-1 that ``option`` chooses from."""
    if text is None:
        return list(range(count))
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not _is_index(first) or (dash and not _is_index(last)):
            raise InputError(f"{option} cannot be read at '{part.strip()}'", "write it like 0,5-8")
        low, high = int(first), int(last or first)
        if low > high:
            raise InputError(f"{option} {low}-{high} runs backwards", f"write {high}-{low}")
        if high >= count:
            raise InputError(f"{what} {high} is out of range", f"there are {count}: 0-{count - 1}")
        chosen.update(range(low, high + 1))
    return sorted(chosen)


def refuse_given(options: Mapping[str, Any], flag: str) -> None:
    """``InputError`` for the first of ``options`` that was given (is not ``None``) without its ``flag``."""
    for name, value in options.items():
        if value is not None:
            raise InputError(f"--{name.replace('_', '-')} goes with {flag}")


def parse_settings(pairs: Iterable[str] | None) -> dict[str, Any]:
    """``["nprobe=4", "estimate=true"]`` as a mapping; integers, reals, true/false and none become such.

    Raises ``InputError`` for text that is not ``key=value`` or a key given twice.
    """
    settings: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = (piece.strip() for piece in pair.partition("="))
        if not equals or not key:
            raise InputError(f"--set '{pair}' is not KEY=VALUE", "write it like --set sink=4")
        if key in settings:
            raise InputError(f"--set gives '{key}' twice")
        settings[key] = _scalar(value)
    return settings


def parse_fractions(text: str, option: str) -> list[float]:
    """Comma-separated fractions of (0, 1], ascending, each once.

    Raises ``InputError`` for anything else, naming ``option`` (like ``--budgets``).
    """
    fractions: set[float] = set()
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            message = f"{option} cannot be read at '{part.strip()}'"
            raise InputError(message, "write it like 0.02,0.05") from None
        if not 0 < value <= 1:
            raise InputError(f"{option}: {part.strip()} lies outside (0, 1]")
        fractions.add(value)
    return sorted(fractions)


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """``budget=0.01,0.02`` as a name and its values, in the order given, each once.

    Raises ``InputError`` for text that is not ``name=value,value``.
    """
    name, equals, values = (piece.strip() for piece in text.partition("="))
    pieces = [piece.strip() for piece in values.split(",")]
    if not name or not equals or not all(pieces):
        raise InputError(f"--sweep '{text}' is not NAME=V1,V2", "write it like --sweep budget=0.01,0.02,0.05")
    return name, list(dict.fromkeys(_scalar(piece) for piece in pieces))


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _scalar(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
