"""The one place that writes to the terminal: human, json or quiet."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtune.progress import Progress, Step, silent

_UNBOUNDED = 10_000
_NUMBER = re.compile(r"[-+−]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?(%|×| [KMGT]?i?B| m?s)?")


class Output:
    """What a command says, and where.

    - human: result, tables and closing lines on stdout, notes and progress on stderr;
    - json: exactly one JSON document on stdout, notes and progress on stderr;
    - quiet: nothing but the path that was written, one on a line (with json: the document alone).

    Progress is drawn only where stderr is a terminal.
    """

    def __init__(self, json: bool = False, quiet: bool = False) -> None:
        self.mode = "json" if json else "quiet" if quiet else "human"
        self._notes = not quiet
        self._out = _console(sys.stdout)
        self._err = _console(sys.stderr)
        drawn = not quiet and self._err.is_terminal and not self._err.is_dumb_terminal
        self.progress: Progress = _Bars(self._err) if drawn else silent

    def result(self, document: Mapping[str, Any] | Sequence[Any], human: Callable[[Output], None]) -> None:
        """Print the command's result: the JSON document, or whatever ``human`` writes, or nothing."""
        if self.mode == "json":
            utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
            print(json.dumps(plain(document), indent=2, allow_nan=False, ensure_ascii=not utf8))
        elif self.mode == "human":
            human(self)

    def line(self, text: str = "") -> None:
        """One line (or paragraph) of the human result."""
        if self.mode == "human":
            self._out.print(Text(text))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str | None = None) -> None:
        """A table of the human result and an empty line; columns of numbers are set flush right."""
        if self.mode != "human":
            return
        texts = [[cell(value) for value in row] for row in rows]
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, title=title, title_justify="left", title_style="bold"
        )
        for index, column in enumerate(columns):
            numbers = all(_is_number(row[index]) for row in rows)
            table.add_column(Text(column), justify="right" if numbers else "left", overflow="fold")
        for row in texts:
            table.add_row(*(Text(text) for text in row))
        with self._out.capture() as drawn:
            self._out.print(table)
        print("\n".join(line.rstrip() for line in drawn.get().splitlines()), end="\n\n")

    def note(self, text: str) -> None:
        """A remark beside the result, on stderr."""
        if self._notes:
            self._err.print(Text(text))

    def closing(self, wrote: Path | None, next_command: str | None) -> None:
        """Last lines: what was written and what to run next (neither is broken over lines)."""
        if self.mode == "quiet" and wrote is not None:
            print(wrote)
        if self.mode != "human":
            return
        if wrote is not None:
            self._out.print(Text(f"wrote {wrote}"), soft_wrap=True)
        if next_command is not None:
            self._out.print(Text(f"next: {next_command}"), soft_wrap=True)


def plain(value: Any) -> Any:
    """``value`` in JSON's own types: paths as text, arrays as lists, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def cell(value: Any) -> str:
    """``value`` as it reads in a table: four significant digits, thousands grouped, nothing as a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)


def bytes_text(count: float) -> str:
    """``count`` bytes with a binary unit: ``1536`` is ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """A duration in at most two units: ``1.5 s``, ``2 min 05 s``, ``1 h 10 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("", "-") or _NUMBER.fullmatch(value) is not None
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _console(stream: TextIO) -> Console:
    """A console that follows the terminal's width, COLUMNS, NO_COLOR; a pipe gets unbroken lines."""
    bounded = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    width = None if bounded else _UNBOUNDED
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


class _Bars:
    """Progress bars with time left; tasks that are open at once share one display."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Any = None

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Step]:
        outermost = self._bars is None
        if outermost:
            self._bars = self._display()
            self._bars.start()
        task = self._bars.add_task(label, total=total, note="")
        try:
            yield _Bar(self._bars, task)
        finally:
            if outermost:
                self._bars.stop()
                self._bars = None
            else:
                self._bars.remove_task(task)

    def _display(self) -> Any:
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("{task.fields[note]}", markup=False),
        )
        # The bars live on stderr: rich would send what is printed on stdout there too.
        return progress.Progress(*columns, console=self._console, transient=True, redirect_stdout=False)


class _Bar:
    def __init__(self, bars: Any, task: Any) -> None:
        self._bars, self._task = bars, task

    def advance(self, n: int = 1, note: str = "") -> None:
        if note:
            self._bars.update(self._task, note=note)
        self._bars.advance(self._task, n)
