"""The report of an analysis: one self-contained HTML page that a stranger can read without a network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import pyarrow as pa

from kvtune.analysis.figures import concentration_figures, locality_figures, policy_figures
from kvtune.analysis.metrics import METRICS
from kvtune.analysis.page import Html, bullets, page, section, table
from kvtune.analysis.text import MISSING, number, percent, size, tokens

Document = Mapping[str, Any]


def render_report(document: Document, metrics: pa.Table) -> str:
    """The page for an analysis document and its tidy table."""
    title = f"Attention and KV cache of {document['model']}"
    policy = document["policy"]
    named = f"{policy['title']} ({_settings(policy)})"
    policy_plots = policy_figures(document, metrics)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(subtitle(document))}</p>',
        bullets(findings(document)),
        f"<p>{escape(_HOW_TO_READ)}</p>",
        "<h2>Summary</h2>",
        _summary_table(document),
        _claims_table(document),
        section("Do decode steps repeat themselves?", _LOCALITY, locality_figures(document, metrics)),
        section(
            "How many tokens does attention need?", _CONCENTRATION, concentration_figures(document, metrics)
        ),
        section(f"What {policy_name(document)} costs and loses", f"{_POLICY} Here: {named}.", policy_plots),
        _layer_table(document),
        _glossary(),
        _provenance(document),
    ]
    return page(title, "\n".join(part for part in parts if part))


_HOW_TO_READ = (
    "While a model writes its answer token by token, every step compares one query with the keys of all "
    "tokens before it and mixes their values by softmax weight. A KV-cache policy reads only some of those "
    "tokens. This page shows, on recorded queries and keys of a real run, how alike the steps are, how few "
    "tokens carry the weight, and what is lost when a policy picks the tokens. Every plot's title says what "
    "it shows; point at a mark to read its value."
)
_LOCALITY = (
    "If a step asks for nearly the same tokens as the step before, a small cache on the GPU serves most of "
    "them. Two steps are always compared over the tokens that both may see, within one answer."
)
_CONCENTRATION = (
    "If a few tokens hold nearly all of the softmax weight, reading only those costs little quality. Layers "
    "and heads differ widely: one budget for all of them is rarely the best."
)
_POLICY = (
    "The policy chooses tokens for every recorded step; its output is compared with full attention over the "
    "recorded keys."
)


def findings(document: Document) -> list[str]:
    """The analysis in a few sentences."""
    found = []
    near, overlap = document["query_cosine"].get("lag1"), document["overlap_at_100"].get("lag1")
    if near and overlap:
        found.append(
            f"Neighbouring decode steps: their queries have a mean cosine of {near['mean']:.2f} and share "
            f"{percent(overlap['mean'])} of their 100 top tokens (chance: {percent(overlap['chance'])})."
        )
    visible, needed = document["visible_tokens"], document["tokens_for_mass"]
    found.append(
        f"Of {tokens(visible)} visible tokens, {tokens(needed['90'])} hold 90% of the attention mass, "
        f"{tokens(needed['95'])} hold 95%, {tokens(needed['99'])} hold 99% (mean over heads, layers, steps)."
    )
    error, mass = document["output_error"], document["attention_mass"]
    found += windows_note(document)
    if not math.isnan(error["mean"]):
        share = document["read_bytes_per_step"] / document["full_read_bytes_per_step"]
        found.append(
            f"{policy_name(document)} reads {percent(share)} of full attention's bytes per step, "
            f"attends {tokens(document['effective_tokens'])} tokens exactly and holds "
            f"{percent(mass['mean'])} of the mass; its output is off by {number(error['mean'])} on average, "
            f"by {number(error['p95'])} at the 95th percentile (relative to the exact output)."
        )
    if overlap and overlap["chance"] > 0.5:
        found.append(
            "These contexts are so short that 100 tokens are most of them: overlap and recall say little."
        )
    return found


@dataclass(frozen=True)
class Row:
    """One line of the summary: a ``note`` beside the value, and what the measure means."""

    measure: str
    value: str
    interval: str
    note: str
    meaning: str


def summary_rows(document: Document) -> list[Row]:
    """The measures that were taken, as text."""
    return [row for row in (*_attention_rows(document), *_policy_rows(document)) if row.value != MISSING]


def _attention_rows(document: Document) -> list[Row]:
    near, overlap = document["query_cosine"].get("lag1", {}), document["overlap_at_100"].get("lag1", {})
    entropy, needed = document["entropy"], document["tokens_for_mass"]
    counts = ", ".join(tokens(needed[share]) for share in ("90", "95", "99"))
    return [
        Row("Query cosine, adjacent steps", number(near.get("mean")), _interval(near, number), "1: the same",
            "cosine between the queries of a decode step and the next"),
        Row("Overlap@100, adjacent steps", percent(overlap.get("mean")), _interval(overlap, percent),
            f"by chance {percent(overlap.get('chance'))}",
            "share of the 100 highest-scoring tokens that a step and the next have in common"),
        Row("Entropy of attention", number(entropy["mean"]), _interval(entropy, number),
            f"nats: like {tokens(math.exp(entropy['mean']))} tokens, evenly",
            "how widely the softmax weight is spread"),
        Row("Tokens for 90, 95, 99%", counts, MISSING,
            f"of the mass; {tokens(document['visible_tokens'])} visible",
            "fewest tokens that together hold that share of the softmax weight"),
    ]  # fmt: skip


def _policy_rows(document: Document) -> list[Row]:
    error, mass, recall = document["output_error"], document["attention_mass"], document["recall_at_100"]
    read, full = document["read_bytes_per_step"], document["full_read_bytes_per_step"]
    return [
        Row("Attention mass held", percent(mass["mean"]), _interval(mass, percent), "on exact tokens",
            "softmax weight of the tokens attended exactly; estimated clusters are not counted"),
        Row("Output error, relative", number(error["mean"]), _interval(error, number),
            f"p50 {number(error['p50'])}, p95 {number(error['p95'])}",
            "length of the difference to full attention's output over the length of that output"),
        Row("Index recall@100", percent(recall["index"]), MISSING, "found, beyond the steady zone",
            "of the 100 top tokens outside the steady zone (always attended), the share attended exactly"),
        Row("Attention recall@100", percent(recall["attention"]), MISSING, "found, of all tokens",
            "of the 100 top tokens among all, the share attended exactly"),
        Row("Effective tokens", tokens(document["effective_tokens"]), MISSING, "exact, per step and KV head",
            "tokens attended exactly, pages of 8 counted whole"),
        Row("Bytes read per step", size(read), MISSING, f"{percent(read / full)} of full: {size(full)}",
            "index scan, estimation and exact pages from device memory, all layers and KV heads measured"),
    ]  # fmt: skip


def _summary_table(document: Document) -> str:
    rows = summary_rows(document)
    with_intervals = any(row.interval != MISSING for row in rows)
    columns = ["measure", "value", *(["95% interval"] if with_intervals else []), "", "what it is"]
    shown = table(
        columns,
        [
            [row.measure, row.value, *([row.interval] if with_intervals else []), row.note, row.meaning]
            for row in rows
        ],
        [1, 2] if with_intervals else [1],
    )
    shown = f'<div class="summary">{shown}</div>'
    return shown + ("" if with_intervals else '<p class="small">Fewer than five samples: no intervals.</p>')


def _claims_table(document: Document) -> str:
    verdicts = {
        True: Html('<span class="yes">holds</span>'),
        False: Html('<span class="no">does not hold</span>'),
        None: Html('<span class="open">cannot tell</span>'),
    }
    rows = [
        (
            f"{c['claim'][0].upper()}{c['claim'][1:]}",
            c["measured"],
            verdicts[c["holds"]],
            c["test"],
            c["source"],
        )
        for c in document["claims"]
    ]
    if not rows:
        return ""
    shown = table(["claim", "measured", "verdict", "tested as", "source"], rows)
    return f'<h2>Claims from the literature</h2><div class="claims">{shown}</div>'


def _layer_table(document: Document) -> str:
    columns = ["layer", "policy", "cosine", "overlap@100", "tokens 95%", "mass held", "error", "error p95",
               "index recall", "effective tokens", "bytes per step"]  # fmt: skip
    rows = []
    for entry in document["layers"]:
        rows.append([
            str(entry["layer"]),
            entry["policy"],
            number(entry["query_cosine"].get("lag1", {}).get("mean")),
            percent(entry["overlap_at_100"].get("lag1", {}).get("mean")),
            tokens(entry["tokens_for_mass"]["95"]),
            percent(entry["attention_mass"]["mean"]),
            number(entry["output_error"]["mean"]),
            number(entry["output_error"]["p95"]),
            percent(entry["recall_at_100"]["index"]),
            tokens(entry["effective_tokens"]),
            size(entry["read_bytes_per_step"]),
        ])  # fmt: skip
    shown = table(columns, rows, [0, *range(2, len(columns))])
    return f'<h2>Layer by layer</h2><div class="dense">{shown}</div>'


def _glossary() -> str:
    rows = [(name, metric.unit, metric.heads, metric.meaning) for name, metric in METRICS.items()]
    shown = table(["metric", "unit", "per", "meaning"], rows)
    return (
        "<h2>How it is measured</h2><p>Scores are those of the model's own softmax: post-RoPE queries and "
        "keys, scaled, each query seeing every key up to its own position (cut by its layer's window). "
        "Means run over decode steps, heads, layers and samples; bands and percentiles over the same "
        "values.</p><details><summary>All metrics of metrics.parquet</summary>"
        f'<div class="dense">{shown}</div></details>'
    )


def _provenance(document: Document) -> str:
    origin, policy = document["provenance"], document["policy"]
    capture = ", ".join(f"{key} {value}" for key, value in origin["capture"].items())
    rows = [
        ("Trace", document["trace"]),
        ("Model", f"{document['model']}, fingerprint {origin['fingerprint']}"),
        ("Capture", capture or MISSING),
        ("Policy", f"{policy['name']}: {_settings(policy)} ({policy['source']})"),
        ("Intervals", f"95% percentile bootstrap over samples (2,000 resamples, seed {document['seed']})"),
        ("Made with", f"kvtune {origin['kvtune']}, torch {origin['torch']}, Python {origin['python']}, "
                      f"{origin['machine']}; {origin['created']}"),
        ("Files beside it", "summary.json (all numbers), metrics.parquet (by sample, turn, layer, head)"),
    ]  # fmt: skip
    return "<h2>Where this comes from</h2>" + table(["", ""], rows)


def subtitle(document: Document) -> str:
    """What was measured, in one line."""
    context, heads = document["context_tokens"], document["heads"]
    length = tokens(float(context["min"]))
    if context["max"] != context["min"]:
        length += f" to {tokens(float(context['max']))}"
    scores = ", ".join(f"{task} {percent(score)}" for task, score in document["score"].items())
    windowed = len(document["windowed_layers"])
    sliding = _count(windowed, "sliding layer") if windowed else ""
    return (
        f"{_count(document['samples'], 'sample')} · prompts of {length} tokens · "
        f"{document['decode_steps']:,} decode steps · {_count(len(document['layers']), 'layer')} × "
        f"{_count(heads['query'], 'query head')} ({_count(heads['kv'], 'KV head')})"
        + (f" · {sliding} left dense" if sliding else "")
        + (f" · score of the answers: {scores}" if scores else "")
    )


def windows_note(document: Document) -> list[str]:
    """What layers with a window of their own do to the numbers, if there are any."""
    windowed, layers = len(document["windowed_layers"]), len(document["layers"])
    if not windowed:
        return []
    if windowed == layers:
        return [
            "Every layer slides a window of its own. Policies leave such layers dense: nothing is chosen."
        ]
    return [
        f"{windowed} of the {layers} layers slide a window of their own. Policies leave them dense: they "
        "count in the bytes, but recall, mass, error and effective tokens are those of the other "
        f"{layers - windowed}."
    ]


def policy_name(document: Document) -> str:
    """The policy, and the precision of the cache that it works on where that is not the model's."""
    policy = document["policy"]
    return policy["name"] if policy["precision"] is None else f"{policy['name']} in {policy['precision']}"


def _settings(policy: Document) -> str:
    settings = [f"{key}={value}" for key, value in policy["parameters"].items()] or ["no parameters"]
    return ", ".join(settings + ([f"KV in {policy['precision']}"] if policy["precision"] else []))


def _interval(entry: Document, show: Any) -> str:
    return f"{show(entry['low'])} to {show(entry['high'])}" if "low" in entry else MISSING


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
