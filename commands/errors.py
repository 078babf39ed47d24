"""The one table: exception → message, hint, exit code."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from typer import Abort

from kvtune.errors import KvtuneError

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_WRONG_PATH = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


@dataclass(frozen=True)
class Report:
    """What the user is told about a failure, and the exit code of the process."""

    error: str
    hint: str | None
    exit_code: int


def debugging() -> bool:
    """Whether the user asked for tracebacks and third-party warnings."""
    return os.environ.get("KVTUNE_DEBUG", "") not in ("", "0")


@contextmanager
def kept(describe: Callable[[], str]) -> Iterator[None]:
    """Where the block is interrupted (Ctrl-C), tell the user what remains on disk."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        interruption.add_note(describe())
        raise


def report(error: BaseException) -> Report:
    """The table. Notes added to an exception become its hint where it has no other."""
    message, hint, code = _row(error)
    notes = "; ".join(getattr(error, "__notes__", ()))
    return Report(message, hint or notes or None, code)


def show(error: BaseException, as_json: bool) -> int:
    """Say on stderr what went wrong, as text or as one JSON object; give the exit code."""
    found = report(error)
    if debugging():
        traceback.print_exception(error)
    if as_json:
        print(json.dumps(asdict(found)), file=sys.stderr)
    else:
        print(f"error: {found.error}", file=sys.stderr)
        if found.hint:
            print(f"hint: {found.hint}", file=sys.stderr)
    return found.exit_code


def _row(error: BaseException) -> tuple[str, str | None, int]:
    match error:
        case KvtuneError():
            return error.message, error.hint, error.exit_code
        case KeyboardInterrupt() | Abort():
            return "interrupted", None, INTERRUPTED
        case ModuleNotFoundError():
            return f"the Python package '{error.name}' is missing", "run 'kvtune doctor'", FAILED
        case UnicodeDecodeError():
            return "a file that should be text is not UTF-8", None, BAD_INPUT
        case OSError():
            return _os_row(error)
    if hasattr(error, "format_message"):
        return _usage_row(error)
    if _out_of_memory(error):
        return "out of memory", "use fewer layers (--layers), a shorter context or another --device", FAILED
    first_line = (str(error).strip().splitlines() or [""])[0]
    message = f"unexpected {type(error).__name__}" + (f": {first_line}" if first_line else "")
    return message, "run it again with KVTUNE_DEBUG=1 to see the traceback", FAILED


def _usage_row(error: Any) -> tuple[str, str | None, int]:
    """Click's own errors, known by their shape: newer versions of Typer bring a copy of click."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "kvtune"
    return _sentence(error.format_message()), f"see '{command} --help'", BAD_INPUT


def _os_row(error: OSError) -> tuple[str, str | None, int]:
    where = f": {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{where}", None, FAILED
    code = BAD_INPUT if isinstance(error, _WRONG_PATH) else FAILED
    return f"{(error.strerror or type(error).__name__).lower()}{where}", None, code


def _out_of_memory(error: BaseException) -> bool:
    # Torch raises its own class on a GPU and a bare RuntimeError on a CPU; importing it here would be slow.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _sentence(text: str) -> str:
    """Click's message in this program's manner: one line, small letter first, no full stop."""
    text = " ".join(text.split()).removesuffix(".")
    return text[:1].lower() + text[1:]
