"""The JSON document of an analysis: measures, layers, claims, provenance."""

from __future__ import annotations

import datetime
import platform
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

import kvtune
from kvtune.analysis.claims import claims
from kvtune.analysis.summary import Summary, bytes_per_step, measures
from kvtune.policies.plan import Plan
from kvtune.traces import Timeline, Trace


def analysis_document(
    trace: Trace,
    plan: Plan,
    summary: Summary,
    timelines: Sequence[Timeline],
    precision: str | None = None,
) -> dict[str, Any]:
    """Everything that ``summary.json`` says (see :func:`kvtune.analysis.analyze`)."""
    lengths = [timeline.prompt_length for timeline in timelines]
    heads = len(trace.kv_heads)
    return {
        "trace": str(trace.path),
        "model": trace.model,
        "policy": {**_policy(plan), "precision": precision},
        "samples": trace.n_samples,
        "timelines": len(timelines),
        "turns": len(summary.turns()),
        "decode_steps": summary.of("visible_tokens", None, summary.layers[0]).count,
        "context_tokens": {
            "min": min(lengths),
            "mean": sum(lengths) / len(lengths),
            "max": max(lengths),
        },
        "heads": {"query": heads * trace.geometry.group, "kv": heads},
        "windowed_layers": windowed_layers(trace, summary.layers),
        "score": scores(trace),
        **measures(summary),
        **bytes_per_step(summary, heads),
        "by_turn": [
            {
                "turn": turn,
                "output_error": {"mean": summary.of_turn("error", turn).mean},
                "attention_mass": {"mean": summary.of_turn("mass", turn).mean},
            }
            for turn in summary.turns()
        ],
        "layers": [
            {
                "layer": number,
                "window": trace.geometry.windows[number],
                "policy": plan.for_layer(trace.layer_info(number)).name,
                **measures(summary, number),
                **bytes_per_step(summary, heads, number),
            }
            for number in summary.layers
        ],
        "claims": claims(summary),
        "provenance": provenance(trace),
    }


def _policy(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.policy.name,
        "title": plan.policy.title,
        "source": plan.policy.source,
        "parameters": plan.policy.parameters(),
        "dense_layers": list(plan.dense_layers),
        "overrides": {str(layer): dict(values) for layer, values in plan.overrides.items()},
    }


def windowed_layers(trace: Trace, layers: Sequence[int]) -> list[int]:
    """Those of ``layers`` with a sliding window of their own, which every policy leaves dense."""
    return [number for number in layers if trace.geometry.windows[number] is not None]


def scores(trace: Trace) -> dict[str, float]:
    """Mean score of the traced answers by task; tasks without a reference are left out."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for record in trace.samples:
        if record.score is not None:
            by_task[record.task].append(record.score)
    return {task: sum(values) / len(values) for task, values in by_task.items()}


def provenance(trace: Trace) -> dict[str, Any]:
    """Where a trace comes from, and what measured it."""
    described = ("workload", "seed", "kvtune_version", "dtype", "digest")
    return {
        "fingerprint": trace.fingerprint,
        "capture": {key: trace.manifest[key] for key in described if key in trace.manifest},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kvtune": kvtune.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
