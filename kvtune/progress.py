"""How long work tells its caller where it stands. The instrument reports; the face draws (or does not)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Step(Protocol):
    """One running task."""

    def advance(self, n: int = 1, note: str = "") -> None:
        """Say that ``n`` more units are done; ``note`` is a short free text (a rate, a file)."""


class Progress(Protocol):
    """Whoever listens to long work."""

    def task(self, label: str, total: int | None) -> AbstractContextManager[Step]:
        """Open a task of ``total`` units (``None``: unknown) for the length of a ``with`` block."""


class _SilentStep:
    def advance(self, n: int = 1, note: str = "") -> None:
        pass


class _SilentProgress:
    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Step]:
        yield _SilentStep()


silent: Progress = _SilentProgress()
"""The listener that hears nothing: what a function uses when its caller passes ``progress=None``."""
