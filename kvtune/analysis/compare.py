"""``compare``: several policies on one trace, each at the budget where it reads the same bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtune.analysis.checks import check_vectors, chosen_layers
from kvtune.analysis.comparison import Comparison
from kvtune.analysis.comparison_page import render_comparison
from kvtune.analysis.document import provenance, scores, windowed_layers
from kvtune.analysis.matching import TOLERANCE, match_budget
from kvtune.analysis.output import check_absent, json_text, write_files
from kvtune.analysis.statistics import rank_correlation
from kvtune.errors import InputError, unknown
from kvtune.policies import all_policies, get_policy
from kvtune.policies.base import Policy
from kvtune.progress import Progress, Step, silent
from kvtune.traces import Trace, open_trace

DOCUMENT, PAGE = "compare.json", "compare.html"
TARGET_POLICY = "wave_index"
REFERENCES = ("full", "oracle_topk")
STORED = "fp8"
"""Precision in which full attention stands beside, too."""

Live = Callable[[Policy], Mapping[str, Any]]


def compare(
    trace: Trace | str | Path,
    policies: Sequence[str],
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    layers: Iterable[int] | None = None,
    target_bytes: float | None = None,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    device: str = "cpu",
    seed: int = 0,
    live: Live | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure ``policies`` where each reads ``target_bytes`` per decode step, over layers and kv heads.

    The target defaults to what the wave index reads here at its shipped defaults. Each policy's budget is
    set so that its mean read bytes are within 2% of it (without those of layers with a window, which no
    policy changes); where none is, the row says so (``matched``, ``note``). Full attention, full attention
    over an FP8 cache and the exact top-k stand beside. ``settings`` gives other parameters by policy;
    ``layers`` default to all in the trace. A policy that this trace cannot serve is listed in ``left_out``
    with the reason. ``live`` measures a policy on the model itself and returns what joins its row
    (``InputError``: a note says why not). Vectors are moved to ``device`` (``cpu``, ``cuda``, ``auto``) layer
    by layer.

    Returns the document: ``policies``, by ascending mean error, each with ``name``, ``params``,
    ``recall_at_100``, ``attention_mass``, ``output_error``, ``effective_tokens`` (per kv head),
    ``read_bytes_per_step``, ``scan_bytes`` (both per step), ``index_bytes``, ``build_seconds`` (both of one
    timeline, over layers), ``matched``, ``note``, ``reference`` and ``by_turn`` (the same by request and
    turn). With ``out``, that folder receives ``compare.json`` and ``compare.html``.

    ``proxy`` has the rank correlation of trace error and live KL over the rows that were run live.

    Raises ``InputError`` for policies that are unknown, named twice or all left out, for settings of a
    policy that is not compared or of its budget, for layers the trace lacks, a device that does not exist, a
    target of no bytes, an ``out`` that holds a comparison, and a trace without values or decode steps;
    ``TraceError`` for a damaged trace.
    """
    started = time.perf_counter()
    if target_bytes is not None and not 0 < target_bytes < float("inf"):
        raise InputError(f"--read-bytes must be above 0, not {target_bytes:g}")
    chosen = _policies(policies, settings or {})
    trace = trace if isinstance(trace, Trace) else open_trace(trace, verify=True)
    comparison = Comparison(trace, chosen_layers(trace, layers), seed, device)
    _check(comparison)
    if out is not None:
        check_absent(Path(out), (DOCUMENT, PAGE), overwrite)
    with (progress or silent).task("comparing", len(chosen) + 1) as step:
        _check_finite(comparison, step)
        target = target_bytes or comparison.read_bytes(get_policy(TARGET_POLICY))
        fixed = _fixed(comparison, target)
        rows, left_out = _rows(comparison, chosen, (target, fixed), live, step)
        rows.append(_stored(comparison, target, fixed))
        step.advance()
    refused = {row["name"]: row["reason"] for row in left_out}
    if all(name in refused for name in policies):
        raise InputError(f"no policy can be compared: {refused[policies[0]]}")
    document = {
        **_header(comparison),
        "target_read_bytes_per_step": target,
        "target": f"{TARGET_POLICY} at its defaults" if target_bytes is None else "given",
        "tolerance": TOLERANCE,
        "full_read_bytes_per_step": next(r["read_bytes_per_step"] for r in rows if r["name"] == "full"),
        "policies": sorted(rows, key=lambda row: row["output_error"]["mean"]),
        "left_out": left_out,
        "proxy": _proxy(rows),
        "seed": seed,
        "seconds": round(time.perf_counter() - started, 3),
        "provenance": provenance(trace),
    }
    if out is not None:
        page, text = render_comparison(document), json_text(document)
        write_files(
            Path(out),
            {
                PAGE: lambda path: path.write_text(page, encoding="utf-8"),
                DOCUMENT: lambda path: path.write_text(text, encoding="utf-8"),
            },
        )
    return document


def _proxy(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How far the error on the trace ranks methods as the live KL does; ``None`` without live runs."""
    run = [row for row in rows if "kl" in row]
    if not run:
        return None
    errors, kls = [row["output_error"]["mean"] for row in run], [row["kl"]["mean"] for row in run]
    found = rank_correlation(errors, kls)
    return {"rank_correlation": None if math.isnan(found) else found, "settings": len(run)}


def _policies(names: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> list[Policy]:
    """The policies to compare and the references, each with its settings."""
    known = all_policies()
    if not names:
        raise InputError("no policy to compare", "name some, like --compare wave_index,quest")
    for place, name in enumerate(names):
        if name not in known:
            raise unknown("policy", name, known)
        if name in names[:place]:
            raise InputError(f"policy '{name}' is named twice")
    every = [*names, *(name for name in REFERENCES if name not in names)]
    for name, given in settings.items():
        if name not in every:
            raise InputError(f"settings for '{name}', which is not compared", f"compared: {', '.join(every)}")
        if known[name].budget in given:
            raise InputError(
                f"'{known[name].budget}' is the budget of policy '{name}', which the comparison sets",
                "set the bytes with --read-bytes",
            )
    return [get_policy(name, settings.get(name)) for name in every]


def _check(comparison: Comparison) -> None:
    trace = comparison.trace
    if not trace.has_values:
        raise InputError("this trace holds no values", "capture it without --no-values")
    if not comparison.timelines:
        raise InputError(
            f"the trace '{trace.path}' holds no decode steps", "capture it with --decode 1 or more"
        )


def _check_finite(comparison: Comparison, step: Step) -> None:
    for timeline in range(len(comparison.timelines)):
        for layer in comparison.layers:
            step.advance(0, note=f"reading layer {layer}")
            check_vectors(comparison.vectors(timeline, layer))


def _rows(
    comparison: Comparison,
    policies: Sequence[Policy],
    goal: tuple[float, float],
    live: Live | None,
    step: Step,
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """A row for each policy that this trace can serve; names and reasons of the others."""
    rows, left_out = [], []
    for policy in policies:
        try:
            rows.append(_row(comparison, policy, goal, live, step))
        except InputError as error:
            hint = f" ({error.hint})" if error.hint else ""
            left_out.append({"name": policy.name, "reason": error.message + hint})
        step.advance()
    return rows, left_out


def _row(
    comparison: Comparison, policy: Policy, goal: tuple[float, float], live: Live | None, step: Step
) -> dict[str, Any]:
    """One policy at the bytes of ``goal``: (all, those of them that no policy can change)."""
    target, fixed = goal

    def measure(candidate: Policy) -> float:
        setting = "" if policy.budget is None else f" {policy.budget}={getattr(candidate, policy.budget):g}"
        step.advance(0, note=policy.name + setting)
        return comparison.read_bytes(candidate) - fixed

    found = match_budget(policy, target - fixed, measure, comparison.longest)
    notes = [found.note] if found.note else []
    row = {
        "name": policy.name,
        "params": found.policy.parameters(),
        "budget": policy.budget,
        **comparison.measure(found.policy),
        "matched": found.matched,
        "reference": policy.name in REFERENCES,
    }
    if live is not None:
        step.advance(0, note=f"{policy.name} live")
        try:
            row |= live(found.policy)
        except InputError as error:
            notes.append(f"not run live: {error.message}")
    return row | {"note": "; ".join(notes)}


def _fixed(comparison: Comparison, target: float) -> float:
    """Bytes that every policy reads; ``InputError`` if that is all that the target allows."""
    fixed = comparison.fixed_bytes()
    if target <= fixed:
        raise InputError(
            f"--read-bytes {target:g} leaves nothing to choose: layers with a window read {fixed:,.0f} bytes",
            "windowed layers stay dense under every policy: set more bytes",
        )
    return fixed


def _stored(comparison: Comparison, target: float, fixed: float) -> dict[str, Any]:
    """Full attention over a quantised cache."""
    measured = comparison.measure_stored(STORED)
    matched = abs(measured["read_bytes_per_step"] - target) <= TOLERANCE * (target - fixed)
    return {
        "name": f"full_{STORED}",
        "params": {"precision": STORED},
        "budget": None,
        **measured,
        "matched": matched,
        "reference": True,
        "note": "" if matched else "no budget to set",
    }


def _header(comparison: Comparison) -> dict[str, Any]:
    """What was measured on."""
    trace, timelines = comparison.trace, comparison.timelines
    lengths = [timeline.prompt_length for timeline in timelines]
    decode = [comparison.vectors(place, comparison.layers[0]).decode for place in range(len(timelines))]
    heads = len(trace.kv_heads)
    return {
        "trace": str(trace.path),
        "model": trace.model,
        "samples": trace.n_samples,
        "timelines": len(timelines),
        "decode_steps": sum(int(steps.sum()) for steps in decode),
        "context_tokens": {"min": min(lengths), "mean": sum(lengths) / len(lengths), "max": max(lengths)},
        "layers": list(comparison.layers),
        "heads": {"query": heads * trace.geometry.group, "kv": heads},
        "windowed_layers": windowed_layers(trace, comparison.layers),
        "score": scores(trace),
    }
