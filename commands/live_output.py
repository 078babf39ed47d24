"""How ``kvtune live`` shows a run or a sweep to people."""

from __future__ import annotations

from typing import Any

from kvtune.commands.output import Output, bytes_text, cell
from kvtune.commands.step_time import show_terms

_COLUMNS = ("measure", "live", "predicted", "full attention", "note")
Rows = list[list[Any]]


def show_run(output: Output, document: dict[str, Any]) -> None:
    """Measured beside predicted and beside full attention; turn by turn where there are several."""
    partly = "; interrupted" if document["interrupted"] else ""
    output.line(
        f"{document['policy']} on the {document['engine']} engine: {document['answers']} answers, "
        f"{document['decode_steps']} decode steps, cache of {document['cache_fraction']:.1%} of the "
        f"context{partly}"
    )
    if windowed := len(document["windowed_layers"]):
        several = f"{windowed} sliding layers stay dense in their window"
        output.line(several if windowed > 1 else "1 sliding layer stays dense in its window")
    rows = [*_quality(document), *_hits(document), *_scores(document), *_times(document), *_memory(document)]
    output.table(_COLUMNS, rows)
    if "hardware" in document:
        _show_step(output, document)
    if document["batch"] is not None:
        show_batch(output, document["batch"])
    if len(document["per_turn"]) > 1:
        columns = ["turn", "KL", "ΔNLL", "interval", "top-1", "score", "full attention's"]
        output.table(columns, [_turn(row) for row in document["per_turn"]], title="Turn by turn")


def show_sweep(output: Output, document: dict[str, Any]) -> None:
    """A row a setting; where the curves are."""
    output.line(f"{document['policy']} on the {document['engine']} engine, over {document['parameter']}")
    columns = [document["parameter"], "KL", "ΔNLL", "top-1", "page hits", "predicted", "step", "predicted ms",
               "GPU bytes"]  # fmt: skip
    output.table(columns, [_setting(row) for row in document["rows"]])
    if "hardware" in document:
        output.line(f"Predicted steps: {_machine(document['hardware'])}.")
    if document["interrupted"]:
        output.line("Interrupted: the last setting may have fewer answers.")
    output.line(f"Curves: {document['files']['page']}")


def _show_step(output: Output, document: dict[str, Any]) -> None:
    """The decode step measured, and predicted term by term."""
    measured, predicted = document["step_ms"]["p50"], document["predicted_step_ms"]
    if predicted is None:
        return
    output.line(
        f"decode step, median {cell(measured)} ms, predicted {cell(predicted)} ms on "
        f"{_machine(document['hardware'])}"
    )
    step = {"total_ms": predicted, "terms": document["predicted_terms_ms"], "measured_ms": measured}
    title = f"predicted terms on {document['hardware']['name']}"
    kernels = document["stages_ms"] if document["engine"] == "fused" else None
    show_terms(output, {**step, "hidden_ms": document["predicted_hidden_ms"]}, title, kernels)


def show_batch(output: Output, batch: dict[str, Any]) -> None:
    """What a batch decodes in a second, beside full attention."""
    shortest, longest = min(batch["lengths"]), max(batch["lengths"])
    lengths = f"{shortest:,}" if shortest == longest else f"{shortest:,}–{longest:,}"
    step, rate = batch["step_ms"]["p50"], batch["tokens_per_second"]
    several = "1 sequence" if batch["size"] == 1 else f"{batch['size']:,} sequences together"
    line = f"{several}, {lengths} tokens: {cell(step)} ms a step, {rate:,.0f} tokens/s"
    if batch["predicted_step_ms"] is not None:
        line += f", predicted {cell(batch['predicted_step_ms'])} ms"
    full, full_rate = batch["full_step_ms"]["p50"], batch["full_tokens_per_second"]
    if full is not None:
        line += f"; full attention {cell(full)} ms, {full_rate:,.0f} tokens/s ({rate / full_rate:.2f}x)"
    output.line(line)
    held, same = batch["gpu_bytes"], batch["same_tokens"]
    output.line(
        f"{bytes_text(held['total'])} on the GPU, {bytes_text(batch['host_bytes'])} on the host (full "
        f"attention {bytes_text(held['full_kv'])}); {same:.1%} of the tokens as each decodes alone"
    )


def _machine(hardware: dict[str, Any]) -> str:
    """Its name; what was measured on, where that is another."""
    name = f"{hardware['name']} ({hardware['source']['kind']})"
    if hardware["same_machine"]:
        return name
    return f"{name}, which is not the machine measured on ({hardware['measured_on']})"


def _quality(document: dict[str, Any]) -> Rows:
    nll, kl = document["delta_nll"], document["kl"]
    return [
        ["KL to full attention, mean", kl["mean"], None, None, "nats per step; 0 is lossless"],
        ["KL, 95th percentile", kl["p95"], None, None, ""],
        [
            "ΔNLL of forced answers",
            nll["mean"],
            None,
            None,
            f"nats per token{_interval(nll)}; above 0 is worse",
        ],
        ["top-1 agreement", f"{document['top1']:.1%}", None, None, "same most likely token"],
    ]


def _hits(document: dict[str, Any]) -> Rows:
    forced, free = (document["forecast_hit_ratio"][kind] for kind in ("forced", "free"))
    live, replayed = document["hit_ratio"], document["replayed_hit_ratio"]
    rows: Rows = [
        [
            f"{unit} hit ratio, forced",
            live[unit],
            forced[unit],
            None,
            _points(forced) if unit == "page" else "",
        ]
        for unit in ("page", "request", "token")
    ]
    rows.append(
        ["page hit ratio, replayed", live["page"], replayed["page"], None, _replay(document["replay_equal"])]
    )
    if free is not None:
        note = "; ".join(part for part in (_points(free), _drift(free["drift"])) if part)
        rows.append(["page hit ratio, free", free["live"]["page"], free["page"], None, note])
    if document["truncations"]:
        note = "blocks wanted but dropped: the execution buffer was full"
        rows.append(["truncated blocks", document["truncations"], None, None, note])
    return rows


def _scores(document: dict[str, Any]) -> Rows:
    rows: Rows = []
    for task, score in document["score"].items():
        change = score["difference"]
        note = score["note"] or f"difference {cell(change['mean'])}{_interval(change)}, {score['n']} answers"
        rows.append([f"score of {task}", f"{score['profile']:.1%}", None, f"{score['full']:.1%}", note])
    return rows


def _times(document: dict[str, Any]) -> Rows:
    step, full = document["step_ms"], document["full_step_ms"]
    stages = ", ".join(f"{name} {cell(value)}" for name, value in document["stages_ms"].items())
    share = document["index_build_ms"] / document["prefill_ms"] if document["prefill_ms"] else None
    return [
        ["decode step, median ms", step["p50"], document["predicted_step_ms"], full["p50"], stages],
        ["decode step, 95th percentile ms", step["p95"], None, full["p95"], ""],
        ["tokens per second", document["tokens_per_second"], None, document["full_tokens_per_second"],
         "the torch engine is not built for speed" if document["engine"] == "torch" else ""],
        ["prefill, ms", document["prefill_ms"], None, document["prefill_ms"], "dense, per context"],
        ["index build, ms", document["index_build_ms"], None, None,
         "" if share is None else f"{share:.1%} of prefill"],
    ]  # fmt: skip


def _memory(document: dict[str, Any]) -> Rows:
    gpu = document["gpu_bytes"]
    if gpu is None:
        return []
    parts = ", ".join(f"{name} {bytes_text(gpu[name])}" for name in ("cache", "index", "buffers", "steady"))
    counted = "; counted, nothing was moved" if document["bytes_are"] == "counted" else ""
    return [
        ["GPU bytes", bytes_text(gpu["total"]), None, bytes_text(gpu["full_kv"]), f"{parts}{counted}"],
        ["host bytes", bytes_text(document["host_bytes"]), None, None, ""],
    ]


def _turn(row: dict[str, Any]) -> list[Any]:
    nll, score = row["delta_nll"], row["score"] or {}
    return [
        row["turn"] + 1,
        row["kl"]["mean"],
        nll["mean"],
        _interval(nll).strip(),
        f"{row['top1']:.1%}",
        score.get("profile"),
        score.get("full"),
    ]


def _setting(row: dict[str, Any]) -> list[Any]:
    gpu = row["gpu_bytes"]
    return [
        row["value"],
        row["kl"]["mean"],
        row["delta_nll"]["mean"],
        f"{row['top1']:.1%}",
        row["hit_ratio"]["page"],
        row["forecast"]["page"],
        f"{cell(row['step_ms']['p50'])} ms",
        row["predicted_step_ms"],
        None if gpu is None else bytes_text(gpu["total"]),
    ]


def _interval(measured: dict[str, Any]) -> str:
    """``' [low, high]'``, or nothing where there are too few groups for one."""
    return "" if measured["low"] is None else f" [{cell(measured['low'])}, {cell(measured['high'])}]"


def _points(forecast: dict[str, Any]) -> str:
    points = forecast["difference_points"]
    return "" if points is None else f"live {points:+.2f} points from the forecast"


def _drift(drift: dict[str, Any]) -> str:
    first = drift["first_token"]
    place = "" if first is None else f", at token {first['median'] + 1:.0f} (median)"
    return f"{drift['diverged']} of {drift['answers']} answers leave full attention's{place}"


def _replay(equal: bool | None) -> str:
    if equal is None:
        return "the policy asks nothing of a cache"
    return "replay of the same accesses: equal" if equal else "replay of the same accesses: NOT EQUAL"
