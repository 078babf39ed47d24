"""The figures of a report: each plot under a sentence that states what it shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvtune.analysis.page import figure
from kvtune.analysis.plots import Series, Show, bar_chart, heatmap, line_chart
from kvtune.analysis.text import number, percent, tokens

Document = Mapping[str, Any]


def locality_figures(document: Document, table: pa.Table) -> list[str]:
    return [
        _cosine_by_lag(document),
        _overlap_by_lag(document),
        _locality_by_layer(document),
        _working_set(document),
        _map(table, "query_cosine", "Query cosine with the next step", number, lag=1),
        _map(table, "overlap", "Overlap@100 with the next step", percent, lag=1),
    ]


def concentration_figures(document: Document, table: pa.Table) -> list[str]:
    return [
        _tokens_by_layer(document),
        _zones_by_layer(document),
        _map(table, "tokens_95", "Tokens for 95% of the mass", tokens, log=True),
        _map(table, "entropy", "Entropy in nats", number),
    ]


def policy_figures(document: Document, table: pa.Table) -> list[str]:
    return [
        _error_by_layer(document),
        _coverage_by_layer(document),
        _bytes_by_layer(document),
        _error_by_turn(document),
        _map(table, "error", "Output error", number),
        _map(table, "mass", "Attention mass held", percent),
    ]


def _lags(entries: Mapping[str, Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    return [float(key[3:]) for key in entries], [entry[name] for entry in entries.values()]


def _cosine_by_lag(document: Document) -> str:
    entries = document["query_cosine"]
    if not entries:
        return ""
    lags, means = _lags(entries, "mean")
    line = Series("mean over heads, layers and steps (band: 10th to 90th percentile)", lags, means,
                  _lags(entries, "p10")[1], _lags(entries, "p90")[1])  # fmt: skip
    plot = line_chart([line], "lag, decode steps", "query cosine", log_x=True, x_ticks=lags, y_range=(0, 1))
    title = f"Queries one step apart have a cosine of {means[0]:.2f}"
    title += f"; {lags[-1]:.0f} steps apart it is {means[-1]:.2f}" if len(lags) > 1 else ""
    return figure(title, plot, "The higher, the better the last step predicts what the next one asks for.")


def _overlap_by_lag(document: Document) -> str:
    entries = document["overlap_at_100"]
    if not entries:
        return ""
    lags, means = _lags(entries, "mean")
    bands = _lags(entries, "p10")[1], _lags(entries, "p90")[1]
    lines = [
        Series("measured (band: 10th to 90th percentile)", lags, means, *bands),
        Series("chance: two random sets", *_lags(entries, "chance"), dashed=True),
    ]
    plot = line_chart(
        lines, "lag, decode steps", "overlap@100", show=percent, log_x=True, x_ticks=lags, y_range=(0, 1)
    )
    title = f"Steps one apart share {percent(means[0])} of their 100 top tokens"
    title += f"; {lags[-1]:.0f} apart, {percent(means[-1])}" if len(lags) > 1 else ""
    return figure(title, plot, "What stays in common can be served from a cache on the GPU.")


def _locality_by_layer(document: Document) -> str:
    layers = document["layers"]
    cosine = _by_layer("query cosine", layers, "query_cosine", "lag1", "mean")
    shared = _by_layer("overlap@100", layers, "overlap_at_100", "lag1", "mean")
    below = _by_layer(
        "top tokens shared with the layer below", layers, "neighbour_layer_overlap_at_100", "mean"
    )
    if not _known(shared):
        return ""
    best = max(zip(shared.y, shared.x), key=lambda pair: -math.inf if math.isnan(pair[0]) else pair[0])
    plot = line_chart([cosine, shared, below], "layer", "cosine, share", y_range=(0, 1))
    title = f"Layer {best[1]:.0f} repeats itself most: {percent(best[0])} overlap between neighbouring steps"
    return figure(
        title, plot, "All between decode steps one apart; the third line compares layers, not steps."
    )


def _working_set(document: Document) -> str:
    sets = {int(width): value for width, value in document["working_set_at_100"].items()}
    if len(sets) < 2:
        return ""
    widths = [float(width) for width in sets]
    unlike = [min(width * sets[1], document["visible_tokens"]) for width in sets]
    lines = [
        Series("measured", widths, list(sets.values())),
        Series("if no token came twice", widths, unlike, dashed=True),
    ]
    plot = line_chart(
        lines,
        "decode steps together",
        "distinct tokens",
        show=tokens,
        log_x=True,
        log_y=True,
        x_ticks=widths,
    )
    last = max(sets)
    title = f"{last} steps together need {tokens(sets[last])} distinct top tokens per head"
    title += f", not {tokens(unlike[-1])}"
    return figure(title, plot, "The size a cache would need to hold what that many steps ask for.")


def _tokens_by_layer(document: Document) -> str:
    layers = document["layers"]
    lines = [
        _by_layer(f"{share}% of the mass", layers, "tokens_for_mass", share) for share in ("90", "95", "99")
    ]
    if not _known(lines[1]):
        return ""
    plot = line_chart(lines, "layer", "tokens needed", show=tokens, log_y=True)
    mean, visible = document["tokens_for_mass"]["95"], document["visible_tokens"]
    title = f"95% of the attention mass needs {tokens(mean)} of {tokens(visible)} tokens on average"
    low, high = _extremes(lines[1])
    title += f"; most in layer {high}, least in layer {low}" if low != high else ""
    return figure(title, plot, "Fewest tokens that hold the mass, mean over heads and steps. Low: sparse.")


def _zones_by_layer(document: Document) -> str:
    layers = document["layers"]
    names = {"sink": "first 4 tokens", "local": "last 64 tokens", "late": "tokens after the prompt"}
    lines = [_by_layer(label, layers, "zone_mass", zone) for zone, label in names.items()]
    if not _known(lines[0]):
        return ""
    mass = document["zone_mass"]
    plot = line_chart(lines, "layer", "attention mass", show=percent, y_range=(0, 1))
    title = f"{percent(mass['sink'])} of the mass lies on the first 4 tokens"
    title += f", {percent(mass['local'])} on the last 64"
    return figure(title, plot, "The last two may be the same tokens, so the lines need not add up to 100%.")


def _error_by_layer(document: Document) -> str:
    layers = document["layers"]
    means = _by_layer("mean", layers, "output_error", "mean")
    if not _known(means):
        return ""
    high = [entry["output_error"]["p95"] for entry in layers]
    labels = [str(entry["layer"]) for entry in layers]
    plot = bar_chart(labels, means.y, "layer", "output error", marks_at=high, mark_label="95th percentile")
    mean, worst = document["output_error"]["mean"], _extremes(means)[1]
    title = f"The policy's output error is {number(mean)} on average; layer {worst} is worst"
    return figure(
        title, plot, "Length of the difference to full attention's output, relative to that output."
    )


def _coverage_by_layer(document: Document) -> str:
    layers = document["layers"]
    lines = [
        _by_layer("attention mass held", layers, "attention_mass", "mean"),
        _by_layer("attention recall@100", layers, "recall_at_100", "attention"),
        _by_layer("index recall@100", layers, "recall_at_100", "index"),
    ]
    if not _known(lines[0]):
        return ""
    plot = line_chart(lines, "layer", "share", show=percent, y_range=(0, 1))
    mass, recall = document["attention_mass"]["mean"], document["recall_at_100"]["index"]
    title = f"Exact tokens hold {percent(mass)} of the mass"
    title += f" and {percent(recall)} of the top 100 beyond the steady zone"
    return figure(
        title,
        plot,
        "Index recall leaves out the tokens that are always attended; attention recall counts all.",
    )


def _bytes_by_layer(document: Document) -> str:
    layers = document["layers"]
    policy = _by_layer("the policy", layers, "read_bytes_per_step")
    if not _known(policy):
        return ""
    full = _by_layer("full attention", layers, "full_read_bytes_per_step")
    unit, name = (1 << 20, "MiB") if max(full.y) >= 1 << 20 else (1 << 10, "KiB")
    plot = bar_chart(
        [str(entry["layer"]) for entry in layers],
        [y / unit for y in policy.y],
        "layer",
        f"{name} read per step",
        marks_at=[y / unit for y in full.y],
        mark_label="full attention",
        value_label=document["policy"]["name"],
    )
    share = document["read_bytes_per_step"] / document["full_read_bytes_per_step"]
    title = f"The policy reads {percent(share)} of the bytes that full attention reads"
    return figure(
        title, plot, "Index scan, estimation and exact pages, from device memory; all KV heads of a layer."
    )


def _error_by_turn(document: Document) -> str:
    turns = [entry for entry in document["by_turn"] if not math.isnan(entry["output_error"]["mean"])]
    if len(turns) < 2:
        return ""
    values = [entry["output_error"]["mean"] for entry in turns]
    plot = bar_chart([str(entry["turn"] + 1) for entry in turns], values, "turn", "output error")
    change = values[-1] / values[0] - 1 if values[0] else 0.0
    title = f"From the first to the last turn the error changes by {change:+.0%}"
    return figure(title, plot, "Methods that drop tokens tend to get worse turn by turn.")


def _map(
    table: pa.Table, metric: str, label: str, show: Show, lag: int | None = None, log: bool = False
) -> str:
    """A layer × head heatmap of a metric's mean over samples, turns and steps."""
    heads, layers, values = head_means(table, metric, lag)
    if not len(heads):
        return ""
    rows, columns = [str(layer) for layer in layers], [str(head) for head in heads]
    plot = heatmap(
        rows, columns, values.tolist(), "query head", "layer", show=show, cell_label=label, log=log
    )
    low, high = (
        np.unravel_index(place, values.shape) for place in (np.nanargmin(values), np.nanargmax(values))
    )
    ends = [f"{show(float(values[r, c]))} (layer {layers[r]}, head {heads[c]})" for r, c in (low, high)]
    return figure(
        f"{label}: from {ends[0]} to {ends[1]}", plot, "Mean over steps. Point at a cell to read it."
    )


def head_means(
    table: pa.Table, metric: str, lag: int | None = None
) -> tuple[list[int], list[int], np.ndarray[Any, np.dtype[np.float64]]]:
    """Heads, layers and the count-weighted mean of ``metric`` [layers, heads] (NaN where absent)."""
    chosen = (pc.field("metric") == metric) & (pc.field("aggregation") == "mean")
    if lag is not None:
        chosen &= pc.field("lag") == lag
    rows = table.filter(chosen)
    layer, head = (rows[name].to_numpy() for name in ("layer", "head"))
    count, value = (rows[name].to_numpy() for name in ("count", "value"))
    layers, layer_at = np.unique(layer, return_inverse=True)
    heads, head_at = np.unique(head, return_inverse=True)
    sums, counts = (np.zeros((len(layers), len(heads))) for _ in range(2))
    np.add.at(sums, (layer_at, head_at), value * count)
    np.add.at(counts, (layer_at, head_at), count)
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    return heads.tolist(), layers.tolist(), means


def _by_layer(label: str, layers: Sequence[Document], *path: str) -> Series:
    """One value of every layer's entry, at ``path``."""
    values = []
    for entry in layers:
        found: Any = entry
        for key in path:
            found = found.get(key, {})
        values.append(float(found) if isinstance(found, float | int) else math.nan)
    return Series(label, [float(entry["layer"]) for entry in layers], values)


def _known(line: Series) -> bool:
    return any(not math.isnan(y) for y in line.y)


def _extremes(line: Series) -> tuple[int, int]:
    """The layers of the lowest and the highest value."""
    known = [(y, int(x)) for x, y in zip(line.x, line.y) if not math.isnan(y)]
    return min(known)[1], max(known)[1]
