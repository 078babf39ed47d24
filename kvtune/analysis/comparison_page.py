"""The page of a comparison: one self-contained HTML file, with the table, plots and what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from kvtune.analysis.named_plots import Point, row_chart, scatter_chart
from kvtune.analysis.page import bullets, figure, page, section, table
from kvtune.analysis.report import subtitle, windows_note
from kvtune.analysis.text import MISSING, number, percent, size, tokens

Document = Mapping[str, Any]


def render_comparison(document: Document) -> str:
    """The page for the document of :func:`kvtune.analysis.compare.compare`."""
    title = f"KV-cache policies at equal read bytes: {document['model']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(subtitle(document))}</p>',
        bullets(findings(document)),
        f"<p>{escape(_HOW_TO_READ)}</p>",
        "<h2>Side by side</h2>",
        _table(document),
        section("Quality at equal bytes", _QUALITY, _quality_figures(document)),
        section("What deciding costs", _COST, _cost_figures(document)),
        _turns(document),
        _provenance(document),
    ]
    return page(title, "\n".join(part for part in parts if part))


_HOW_TO_READ = (
    "Every policy was replayed on the recorded queries and keys of a real run, with its budget set so that a "
    "decode step reads the same number of bytes from device memory: the index it scans, what it estimates "
    "from, and the tokens it attends, in pages of 8. Output error is the length of the difference to full "
    "attention's output over the length of that output. Full attention, full attention over an FP8 cache and "
    "the exact top-k, whose choice costs nothing, stand beside as references."
)
_QUALITY = (
    "Recall counts the 100 highest-scoring tokens that are attended exactly, among all tokens or outside "
    "those that are always attended. Mass is the softmax weight of the tokens attended exactly; a policy "
    "that estimates the rest can have a small error with little mass."
)
_COST = (
    "What is scanned on every step, the room the index takes beside the cache, and the time to build it on "
    "this machine, all layers and KV heads measured together."
)


def findings(document: Document) -> list[str]:
    """The comparison in a few sentences."""
    target, full = document["target_read_bytes_per_step"], document["full_read_bytes_per_step"]
    why = "as given" if document["target"] == "given" else f"what {document['target']} reads"
    found = [
        f"The target is {size(target)} per decode step ({why}), {percent(target / full)} of the "
        f"{size(full)} that full attention reads."
    ]
    found += windows_note(document)
    if target >= 0.98 * full:
        found.append(
            "That is all there is to read, so nothing is chosen: set fewer bytes, or capture longer contexts."
        )
    equal = [row for row in document["policies"] if row["matched"] and not row["reference"]]
    if equal:
        ranking = ", ".join(f"{_named(row)} {number(row['output_error']['mean'])}" for row in equal)
        found.append(f"Mean output error of those at the target, best first: {ranking}.")
    proxy = document["proxy"]
    if proxy is not None and proxy["rank_correlation"] is not None:
        found.append(
            f"Over the {proxy['settings']} rows run live, the rank correlation of the error on the trace "
            f"with the live KL is {proxy['rank_correlation']:.2f} (1: the same order)."
        )
    found += [
        f"{row['name']} is not at the target: {row['note']}."
        for row in document["policies"]
        if not row["matched"] and not row["reference"]
    ]
    return found + [f"{row['name']} was left out: {row['reason']}." for row in document["left_out"]]


def _named(row: Document) -> str:
    """A policy's name and budget, like ``quest (token_budget=96)``."""
    return f"{row['name']} ({setting(row)})" if setting(row) else row["name"]


def setting(row: Document) -> str:
    """The budget that a row was measured at, like ``tokens=96``."""
    budget = row["budget"]
    return "" if budget is None else f"{budget}={row['params'][budget]:,.6g}"


def _table(document: Document) -> str:
    live = any("kl" in row for row in document["policies"])
    columns = ["policy", "budget", "error", "error p95", "mass held", "index recall", "attention recall",
               "effective tokens", "bytes per step", "of them scan", "index", "build, s",
               *(["live KL"] if live else []), "note"]  # fmt: skip
    rows = [
        [
            row["name"],
            setting(row) or MISSING,
            number(row["output_error"]["mean"]),
            number(row["output_error"]["p95"]),
            percent(row["attention_mass"]["mean"]),
            percent(row["recall_at_100"]["index"]),
            percent(row["recall_at_100"]["attention"]),
            tokens(row["effective_tokens"]),
            size(row["read_bytes_per_step"]),
            size(row["scan_bytes"]),
            size(row["index_bytes"]),
            number(row["build_seconds"]),
            *([number(row.get("kl", {}).get("mean"))] if live else []),
            row["note"],
        ]
        for row in document["policies"]
    ]
    return f'<div class="dense notes">{table(columns, rows, range(2, len(columns) - 1))}</div>'


def _quality_figures(document: Document) -> list[str]:
    rows = document["policies"]
    names = [row["name"] for row in rows]
    points = [
        Point(row["name"], row["read_bytes_per_step"], row["output_error"]["mean"], row["reference"])
        for row in rows
    ]
    error = row_chart(
        names,
        [row["output_error"]["mean"] for row in rows],
        "output error, relative",
        marks_at=[row["output_error"]["p95"] for row in rows],
        mark_label="95th percentile",
    )
    mass = row_chart(names, [r["attention_mass"]["mean"] for r in rows], "attention mass", show=percent)
    recalls = {kind: [row["recall_at_100"][kind] for row in rows] for kind in ("index", "attention")}
    return [
        figure(
            "Error against bytes: lower and further left is better",
            scatter_chart(points, "bytes read per step", "mean output error", show_x=size, show_y=number),
            "The second colour marks references.",
        ),
        figure("Output error, mean and 95th percentile", error),
        figure("Attention mass on the tokens attended exactly", mass),
        figure(
            "Index recall@100: outside what is always attended",
            row_chart(names, recalls["index"], "share found", show=percent),
        ),
        figure(
            "Attention recall@100: among all tokens",
            row_chart(names, recalls["attention"], "share found", show=percent),
        ),
    ]


def _cost_figures(document: Document) -> list[str]:
    rows = document["policies"]
    names = [row["name"] for row in rows]
    seconds = [row["build_seconds"] for row in rows]
    kept = [row for row in rows if not math.isnan(row.get("kl", {}).get("mean", math.nan))]
    return [
        figure(
            "Bytes scanned per step",
            row_chart(names, [row["scan_bytes"] for row in rows], "bytes per step", show=size),
        ),
        figure(
            "Room of the index beside the cache",
            row_chart(names, [row["index_bytes"] for row in rows], "bytes, one timeline", show=size),
        ),
        figure("Time to build the index", row_chart(names, seconds, "seconds, one timeline")),
        figure(
            "KL to full attention, live on the model",
            row_chart([row["name"] for row in kept], [row["kl"]["mean"] for row in kept], "nats per step"),
        ),
    ]


def _turns(document: Document) -> str:
    """Mean error by request and turn; nothing where there is only one."""
    rows = document["policies"]
    places = [(part["request"], part["turn"]) for part in rows[0]["by_turn"]]
    if len(places) < 2:
        return ""
    columns = ["policy", *(f"request {request}, turn {turn}" for request, turn in places)]
    cells = [
        [row["name"], *(number(part["output_error"]["mean"]) for part in row["by_turn"])] for row in rows
    ]
    shown = table(columns, cells, range(1, len(columns)))
    return f'<h2>Error by request and turn</h2><div class="dense">{shown}</div>'


def _provenance(document: Document) -> str:
    origin = document["provenance"]
    capture = ", ".join(f"{key} {value}" for key, value in origin["capture"].items())
    others = [
        (row["name"], ", ".join(f"{key}={value}" for key, value in row["params"].items()) or MISSING)
        for row in document["policies"]
    ]
    rows = [
        ("Trace", document["trace"]),
        ("Model", f"{document['model']}, fingerprint {origin['fingerprint']}"),
        ("Capture", capture or MISSING),
        ("Layers", ", ".join(map(str, document["layers"]))),
        ("Equal bytes", f"within {percent(document['tolerance'])} of the target"),
        ("Made with", f"kvtune {origin['kvtune']}, torch {origin['torch']}, Python {origin['python']}, "
                      f"{origin['machine']}; {origin['created']}"),
        ("File beside it", "compare.json (all numbers, by request and turn)"),
    ]  # fmt: skip
    return (
        "<h2>Where this comes from</h2>"
        + table(["", ""], rows)
        + f"<details><summary>All parameters</summary>{table(['policy', 'parameters'], others)}</details>"
    )
