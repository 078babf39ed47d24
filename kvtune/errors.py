"""Every failure a user can cause or meet, as message + hint + exit code (shown by ``commands``)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvtuneError(Exception):
    """Base of all expected failures: one sentence, an optional hint, an exit code."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RunError(KvtuneError):
    """The run itself failed (disk full, out of memory, a broken file being written)."""


class InputError(KvtuneError):
    """Bad input or usage; nothing was written."""

    exit_code = 2


class TraceError(InputError):
    """A trace folder or file that is corrupt, truncated, foreign or of a newer format."""


class Infeasible(KvtuneError):
    """Nothing satisfies the given constraints; no profile is written."""

    exit_code = 3


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An ``InputError`` for an unknown ``kind`` called ``name``, with the closest known names as hint."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known)}"
    return InputError(f"unknown {kind} '{name}'", hint)
