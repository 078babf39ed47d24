"""``analyze``: what a trace says about attention's locality and concentration, and about one policy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from kvtune.analysis.checks import check_vectors, chosen_layers, served_layers
from kvtune.analysis.document import analysis_document
from kvtune.analysis.locality import LAGS
from kvtune.analysis.measure import (
    TOP_K,
    LayerRanking,
    measure_attention,
    measure_neighbour,
    measure_policy,
)
from kvtune.analysis.metrics import Observations
from kvtune.analysis.output import check_out, write_analysis
from kvtune.analysis.summary import Summary
from kvtune.analysis.tidy import TidyTable
from kvtune.devices import choose_device
from kvtune.errors import InputError
from kvtune.policies import Policy, get_policy
from kvtune.policies.plan import Plan, as_plan
from kvtune.progress import Progress, silent
from kvtune.quantisation import get_precision
from kvtune.traces import Timeline, Trace, open_trace

DEFAULT_POLICY = "wave_index"


def analyze(
    trace: Trace | str | Path,
    policy: Policy | Plan | str | None = None,
    settings: Mapping[str, Any] | None = None,
    layers: Iterable[int] | None = None,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    precision: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure a trace: locality and concentration of attention, and what ``policy`` costs and loses.

    ``policy`` is a policy, a plan, or a name (default ``wave_index``) with ``settings``; ``layers`` default
    to all in the trace. All decode steps of all samples are measured; a trace without values gives no
    policy measures. With ``precision`` (``fp8``, ``int4``, …) the policy indexes and attends keys and values
    held in it; the truth stays as recorded. With ``out``, that folder receives ``summary.json``,
    ``metrics.parquet`` and ``report.html``; ``overwrite`` replaces those three there.

    Returns the document of ``summary.json``: the measures of
    :func:`~kvtune.analysis.summary.measures`, bytes per step, ``layers`` (the same per layer), ``claims``
    and provenance. Numbers are NaN where nothing could be measured. ``seed`` drives the bootstrap.

    Raises ``InputError`` for unknown policies, parameters, precisions or layers and an ``out`` that exists,
    ``TraceError`` for a damaged trace and for NaN or infinite keys (sample, layer, head, position).
    """
    started = time.perf_counter()
    plan = _plan(policy, settings)
    if precision is not None:
        get_precision(precision)
    place = choose_device(device)
    trace = trace if isinstance(trace, Trace) else open_trace(trace, verify=True)
    if precision is not None and not trace.has_values:
        raise InputError(
            "a precision needs values, and this trace holds none", "capture it without --no-values"
        )
    chosen = chosen_layers(trace, layers)
    served = served_layers(trace, chosen)
    if out is not None:
        check_out(Path(out), overwrite)
    summary, tidy = Summary(seed), TidyTable(trace.kv_heads, trace.geometry.group)
    timelines = [timeline for sample in range(trace.n_samples) for timeline in trace.timelines(sample)]
    with (progress or silent).task("analyzing", len(timelines) * len(chosen)) as task:
        for timeline in timelines:
            below: LayerRanking | None = None
            for number in chosen:
                below, found = _measure(timeline, number, plan, below, place, precision)
                if found:
                    summary.add(timeline.sample, number, found, number in served)
                    tidy.add(timeline.sample, timeline.index, number, found)
                task.advance(note=f"sample {timeline.sample}, layer {number}")
    if not summary.layers:
        raise InputError(
            f"the trace '{trace.path}' holds no decode steps", "capture it with --decode 1 or more"
        )
    document = analysis_document(trace, plan, summary, timelines, precision)
    document["seed"], document["seconds"] = seed, round(time.perf_counter() - started, 3)
    if out is not None:
        write_analysis(Path(out), document, tidy.table())
    return document


def _plan(policy: Policy | Plan | str | None, settings: Mapping[str, Any] | None) -> Plan:
    if policy is None or isinstance(policy, str):
        return as_plan(get_policy(policy or DEFAULT_POLICY, settings))
    if settings:
        raise InputError("settings go with a policy's name, not with a policy that is already built")
    return as_plan(policy)


def _measure(
    timeline: Timeline,
    number: int,
    plan: Plan,
    below: LayerRanking | None,
    device: torch.device,
    precision: str | None,
) -> tuple[LayerRanking, list[Observations]]:
    """One layer of one timeline: its ranking, which serves the layer above, and all that was measured."""
    layer = timeline.layer(number)
    check_vectors(layer)
    layer = layer.to(device)
    ranking = measure_attention(layer, timeline.prompt_length, TOP_K, LAGS)
    found = ranking.observations + measure_neighbour(below, ranking, layer)
    if timeline.trace.has_values:
        found += measure_policy(layer, timeline.prompt_length, plan.for_layer(layer.info), precision)
    return ranking, [seen.cpu() for seen in found]
