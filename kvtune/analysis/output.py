"""An analysis on disk: a folder of files that appear together."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvtune.analysis.report import render_report
from kvtune.errors import InputError, RunError
from kvtune.traces import atomic

SUMMARY, METRICS_TABLE, REPORT = "summary.json", "metrics.parquet", "report.html"


def check_out(folder: Path, overwrite: bool) -> None:
    """Refuse an output folder that exists and holds anything, unless ``overwrite``; ``InputError``."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"'{folder}' is a file, not a folder", "name another folder with --out")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise InputError(
            f"the output folder '{folder}' exists", "name another with --out, or use --overwrite"
        )


def check_absent(folder: Path, names: Iterable[str], overwrite: bool) -> None:
    """Refuse a ``folder`` that holds one of the files ``names``, unless ``overwrite``; ``InputError``."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"'{folder}' is a file, not a folder", "name another folder with --out")
    there = [folder / name for name in names if (folder / name).exists()]
    if there and not overwrite:
        raise InputError(f"'{there[0]}' exists", "name another folder with --out, or use --overwrite")


def write_analysis(folder: Path, document: Mapping[str, Any], table: pa.Table) -> None:
    """Write the three files (see :func:`write_files`), ``summary.json`` last."""
    page = render_report(document, table)
    text = json_text(document)
    write_files(
        folder,
        {
            METRICS_TABLE: lambda path: pq.write_table(table, path, compression="zstd"),
            REPORT: lambda path: path.write_text(page, encoding="utf-8"),
            SUMMARY: lambda path: path.write_text(text, encoding="utf-8"),
        },
    )


def write_files(folder: Path, writers: Mapping[str, Callable[[Path], object]]) -> None:
    """Write a file of each name with its writer: all under temporary names first, then renamed, in order.

    Other files in ``folder`` are left alone. Raises ``RunError`` if they can't be written; nothing is then
    changed.
    """
    temporary = {name: folder / f".{name}.tmp-{os.getpid()}" for name in writers}
    fresh = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in writers.items():
            write(temporary[name])
            atomic.sync(temporary[name])
        for name, path in temporary.items():
            atomic.move(path, folder / name)
        fresh = False
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = "the disk is full" if full else (error.strerror or str(error))
        raise RunError(
            f"the analysis could not be written to '{folder}': {why}", "nothing was kept"
        ) from error
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
        if fresh and folder.is_dir():
            folder.rmdir()


def json_text(document: Mapping[str, Any]) -> str:
    """``document`` as the text of a JSON file."""
    return json.dumps(jsonable(document), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def jsonable(value: Any) -> Any:
    """``value`` with NaN and infinities as ``None``, which JSON can say."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
