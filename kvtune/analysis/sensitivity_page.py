"""The page of a sensitivity run: heat maps of layer by head, and the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from kvtune.analysis.page import bullets, figure, page, section, table
from kvtune.analysis.plots import heatmap
from kvtune.analysis.text import number, percent

Document = Mapping[str, Any]
_CASES = {"output_error": "keys and values", "keys": "keys alone", "values": "values alone"}
_INTRO = (
    "Every decode step of the trace attends all its tokens, once as recorded and once with keys, values or "
    "both held in fewer bits. The error is the length of the difference between the two attention outputs, "
    "relative to the first. Heads differ widely, which is why keeping a few of them native can pay."
)


def render_sensitivity(document: Document) -> str:
    """The page for a document of :func:`kvtune.analysis.sensitivity`."""
    title = f"KV precision of {document['model']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{document["samples"]} samples, {document["decode_steps"]:,} decode steps</p>',
        bullets([plan_sentence(document["plan"]), parts_sentence(document)]),
        f"<p>{escape(_INTRO)}</p>",
        table(
            ["precision", "bytes per token", "mean error", "p95", "keys alone", "values alone"],
            precision_rows(document),
            numeric=range(1, 6),
        ),
    ]
    for name, entry in document["precisions"].items():
        figures = [_map(document, name, case, label) for case, label in _CASES.items()]
        parts.append(section(f"{name}: {entry['title']}", "Mean over decode steps, by kv head.", figures))
    return page(title, "\n".join(part for part in parts if part))


def precision_rows(document: Document) -> list[list[str]]:
    """Precision, bytes per token of one head, mean error, p95, mean with keys and with values alone."""
    return [
        [
            name,
            f"{entry['bytes_per_token']:g}",
            number(entry["output_error"]["mean"]),
            number(entry["output_error"]["p95"]),
            number(entry["keys"]["mean"]),
            number(entry["values"]["mean"]),
        ]
        for name, entry in document["precisions"].items()
    ]


def plan_sentence(plan: Mapping[str, Any]) -> str:
    """What the plan says, in one sentence."""
    error, size, kept = plan["output_error"], plan["bytes_per_token"], len(plan["native_heads"])
    heads = f"{kept} head" if kept == 1 else f"{kept} heads"
    said = (
        f"{plan['precision']} with {heads} native ({percent(plan['native_share'])}): mean error "
        f"{number(error['mixed'])} instead of {number(error['uniform'])} ({percent(plan['drop'])} less), "
        f"{percent(size['mixed'] / size['native'])} of the native bytes"
    )
    return (
        said if plan["within_max_error"] else f"{said}; no precision stays under {number(plan['max_error'])}"
    )


def parts_sentence(document: Document) -> str:
    """Whether keys or values lose more, precision by precision."""
    found = document["precisions"].items()
    keys = [name for name, entry in found if entry["keys"]["mean"] > entry["values"]["mean"]]
    values = [name for name in document["precisions"] if name not in keys]
    said = [f"keys lose more than values in {', '.join(keys)}"] if keys else []
    said += [f"values lose at least as much as keys in {', '.join(values)}"] if values else []
    sentence = "; ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}"


def _map(document: Document, name: str, case: str, label: str) -> str:
    """A layer × kv head heat map of one case of one precision."""
    layers, heads = document["layers"], document["kv_heads"]
    found = {
        (entry["layer"], entry["kv_head"]): entry[case]
        for entry in document["heads"]
        if entry["precision"] == name
    }
    values = [[found.get((layer, head), math.nan) for head in heads] for layer in layers]
    plot = heatmap(
        [str(layer) for layer in layers],
        [str(head) for head in heads],
        values,
        "kv head",
        "layer",
        cell_label="output error",
    )
    worst, best = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
    return figure(
        f"{label[0].upper()}{label[1:]}: from {number(found[best])} to {number(found[worst])} "
        f"(layer {worst[0]}, head {worst[1]})",
        plot,
    )
