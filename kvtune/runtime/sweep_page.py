"""The page of a sweep: live curves over the simulated ones, and the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from kvtune.analysis.page import figure, page, section, table
from kvtune.analysis.plots import Series, Show, line_chart
from kvtune.analysis.text import number, percent, size

Document = Mapping[str, Any]

_TEXT = (
    "Every point is a run of the real model. Live hit ratios are counted by the block caches of the run; the "
    "dashed line is the simulator's forecast from full attention's queries of the same tokens. KL is to full "
    "attention's distribution, per step."
)
_COLUMNS = ("value", "KL", "KL p95", "ΔNLL", "top-1", "page hits, live", "page hits, forecast",
            "difference, points", "step p50, ms", "GPU bytes")  # fmt: skip


def render_sweep(document: Document) -> str:
    """The page for the document of :func:`kvtune.runtime.sweep.sweep`."""
    title = f"{document['policy']} live over {document['parameter']}: {document['model']}"
    rows = document["rows"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        section("Curves", _TEXT, _figures(document)),
        "<h2>Numbers</h2>",
        table(_COLUMNS, [_cells(row) for row in rows], range(len(_COLUMNS))),
    ]
    if document["interrupted"]:
        parts.insert(1, "<p>The sweep was interrupted: its last setting may have fewer answers.</p>")
    return page(title, "\n".join(parts))


def _figures(document: Document) -> list[str]:
    """Nothing where the values are no numbers."""
    rows, name = document["rows"], document["parameter"]
    values = [row["value"] for row in rows]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return []
    rows = sorted(rows, key=lambda row: row["value"])

    def chart(label: str, lines: Sequence[tuple[str, Callable[[Document], Any], bool]], show: Show) -> str:
        xs = [float(row["value"]) for row in rows]
        drawn = [
            Series(legend, xs, [_known(value(row)) for row in rows], dashed=dashed)
            for legend, value, dashed in lines
        ]
        return line_chart(drawn, name, label, show=show, log_x=xs[0] > 0, x_ticks=xs)

    forecast = ("forecast from full attention", lambda row: row["forecast"]["page"], True)
    full = ("full attention", lambda row: row["full_step_ms"]["p50"], True)
    return [
        figure("Page hit ratio", chart("page hit ratio",
               [("live", lambda row: row["hit_ratio"]["page"], False), forecast], percent)),
        figure("KL to full attention", chart("nats per step",
               [("live", lambda row: row["kl"]["mean"], False)], number)),
        figure("Step time", chart("median, ms",
               [("live", lambda row: row["step_ms"]["p50"], False), full], number)),
    ]  # fmt: skip


def _cells(row: Document) -> list[str]:
    gpu = row["gpu_bytes"]
    value = row["value"]
    return [
        f"{value:,.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value),
        number(row["kl"]["mean"]),
        number(row["kl"]["p95"]),
        number(row["delta_nll"]["mean"]),
        percent(row["top1"]),
        percent(row["hit_ratio"]["page"]),
        percent(row["forecast"]["page"]),
        number(row["forecast"]["difference_points"]),
        number(row["step_ms"]["p50"]),
        size(None if gpu is None else gpu["total"]),
    ]


def _known(value: float | None) -> float:
    return math.nan if value is None else value
