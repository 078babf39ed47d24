"""Shared by every benchmark: what it ran on, and one JSON file of rows written atomically.

A row says ``name``, ``value`` and ``unit`` of the thing measured, and ``peer``, ``peer_value`` and
``ratio`` of what it was held against in the same run (``None`` where there is no peer).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

RESULTS = Path(__file__).parent / "results"
REQUIRED = ("name", "value", "unit", "peer", "peer_value", "ratio")
PACKAGES = (
    "kvtune",
    "torch",
    "transformers",
    "numpy",
    "pyarrow",
    "numba",
    "triton",
    "faiss-cpu",
    "faiss-gpu",
)


def record(rows: list[dict[str, Any]], name: str) -> Path:
    """Write ``rows`` to ``results/<name>.json``, each with machine, versions and date filled in.

    Extra keys are kept. Raises ``ValueError`` if a row lacks one of ``REQUIRED``.
    """
    for row in rows:
        missing = [key for key in REQUIRED if key not in row]
        if missing:
            raise ValueError(f"benchmark row {row.get('name', '?')!r} lacks {', '.join(missing)}")
    shared = {"machine": machine(), "versions": versions(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump([{**row, **shared} for row in rows], file, indent=1, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as plain aligned text: name, value, peer, peer's value, ratio."""
    lines = [("what", "value", "peer", "peer value", "ratio")]
    for row in rows:
        unit = row["unit"]
        lines.append(
            (
                row["name"],
                _quantity(row["value"], unit),
                row["peer"] or "-",
                _quantity(row["peer_value"], unit),
                "-" if row["ratio"] is None else f"{row['ratio']:.2f}x",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def best_seconds(body: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of ``repeats`` timed calls, after one that is not counted."""
    return best_seconds_of(body, repeats=repeats)[0]


def best_seconds_of(*bodies: Callable[[], object], repeats: int = 5) -> list[float]:
    """:func:`best_seconds` of each of several bodies that take turns.

    So a busy moment of the machine does not fall on one of them alone.
    """
    shortest = [float("inf")] * len(bodies)
    for repeat in range(repeats + 1):
        for index, body in enumerate(bodies):
            start = perf_counter()
            body()
            if repeat:
                shortest[index] = min(shortest[index], perf_counter() - start)
    return shortest


def machine() -> str:
    """Processor, cores, memory, GPU and system: no host or user name."""
    parts = [_processor(), f"{os.cpu_count()} cores", f"{_memory_gib():.0f} GiB"]
    gpu = _gpu()
    if gpu:
        parts.append(gpu)
    parts.append(f"{platform.system()} {platform.machine()}")
    return ", ".join(parts)


def versions() -> dict[str, str]:
    """Python and those of ``PACKAGES`` that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    return f"{count}x {torch.cuda.get_device_name(0)}" if count > 1 else torch.cuda.get_device_name(0)


def _quantity(value: Any, unit: str) -> str:
    if value is None:
        return "-"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{text} {unit}".strip()
