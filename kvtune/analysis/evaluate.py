"""What a policy costs and loses on a recorded layer: recall, mass, output error, bytes, accesses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvtune.analysis.recall import recalls
from kvtune.attention import (
    attention_scores,
    estimation_zone,
    exact_attention,
    exact_zone,
    group_queries,
    merge_zones,
)
from kvtune.caching.access_log import AccessLog, UnitAccesses, join_accesses, unit_accesses
from kvtune.geometry import LayerInfo
from kvtune.policies.base import Policy, Selection
from kvtune.policies.plan import Plan, as_plan
from kvtune.progress import Progress, silent
from kvtune.quantisation import HeadPrecision, PrecisionPlan, QuantisedLayer, quantised
from kvtune.traces import Timeline, TimelineLayer, Trace

STEP_CHUNK = 32
"""Recorded steps evaluated at once: memory stays at [32, Hq, N]."""
_GATHER_BYTES = 128 << 20


@dataclass
class DecodeQueries:
    """The decode steps of one layer: queries [T, H, G, d], positions [T], turns [T]."""

    queries: Tensor
    positions: Tensor
    turns: Tensor


@dataclass
class LayerTruth:
    """Full attention of all decode steps: outputs [T, H, G, dv] and log-sum-exp [T, H, G], float32.

    ``best`` [T, H, G, 100] int32: the best tokens of each query; filled when recall is first measured.
    """

    outputs: Tensor
    lse: Tensor
    best: Tensor | None = None


@dataclass
class LayerEvaluation:
    """One policy on one layer of one timeline.

    Per step and query head [T, Hq]: ``recall_index`` and ``recall_attention`` (recall@100; empty where not
    asked for; 1 where no token is eligible), ``mass`` (softmax probability of the exact tokens), ``error``
    (‖o − o_full‖ / ‖o_full‖). Per step and kv head [T, H]: ``read_bytes``, ``scan_bytes``,
    ``effective_tokens``. ``accesses`` has one entry per kv head.
    """

    policy: Policy
    layer: LayerInfo
    positions: Tensor
    recall_index: Tensor
    recall_attention: Tensor
    mass: Tensor
    error: Tensor
    read_bytes: Tensor
    scan_bytes: Tensor
    effective_tokens: Tensor
    accesses: list[UnitAccesses]
    build_seconds: float


def decode_queries(layer: TimelineLayer) -> DecodeQueries:
    """The decode steps of ``layer`` in order of position."""
    chosen = layer.decode
    order = torch.argsort(layer.query_positions[chosen], stable=True)
    return DecodeQueries(
        group_queries(layer.queries[chosen][order], layer.keys.shape[0]),
        layer.query_positions[chosen][order],
        layer.turns[chosen][order],
    )


def prompt_queries(layer: TimelineLayer, prompt_length: int, window: int) -> Tensor:
    """The last ``window`` recorded queries before ``prompt_length``, [H, G, W, d] (W may be smaller)."""
    before = torch.nonzero(layer.query_positions < prompt_length)[:, 0]
    order = torch.argsort(layer.query_positions[before], stable=True)
    last = before[order][-window:] if window else before[:0]
    return group_queries(layer.queries[last], layer.keys.shape[0]).permute(1, 2, 0, 3)


def true_scores(layer: TimelineLayer, steps: DecodeQueries, chunk: slice) -> Tensor:
    """Logits of every key for the decode steps of ``chunk``, [t, H, G, N], -inf where not eligible."""
    return attention_scores(
        steps.queries[chunk], layer.keys, steps.positions[chunk], layer.key_positions, layer.info
    )


def chunks(steps: int, size: int = STEP_CHUNK) -> Iterator[slice]:
    """Slices of at most ``size`` steps."""
    for start in range(0, steps, size):
        yield slice(start, min(start + size, steps))


def layer_truth(layer: TimelineLayer) -> LayerTruth:
    """Full attention for every decode step of ``layer``."""
    steps = decode_queries(layer)
    parts = [
        exact_attention(
            steps.queries[c], layer.keys, layer.values, steps.positions[c], layer.key_positions, layer.info
        )
        for c in chunks(len(steps.positions))
    ]
    return LayerTruth(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def build_index(policy: Policy, layer: TimelineLayer, prompt_length: int) -> object:
    """The policy's index over the prompt, then every later token of the timeline appended."""
    index = policy.build(
        layer.keys[:, :prompt_length],
        layer.values[:, :prompt_length],
        prompt_queries(layer, prompt_length, policy.prompt_window),
        layer.info,
    )
    if layer.keys.shape[1] > prompt_length:
        policy.append(
            index,
            layer.keys[:, prompt_length:],
            layer.values[:, prompt_length:],
            layer.key_positions[prompt_length:],
        )
    return index


def evaluate(
    policy: Policy,
    layer: TimelineLayer,
    prompt_length: int,
    *,
    index: object | None = None,
    truth: LayerTruth | None = None,
    recall: bool = True,
    precision: str | HeadPrecision | PrecisionPlan | None = None,
) -> LayerEvaluation:
    """Run ``policy`` over the decode steps of one layer of a timeline and measure it.

    ``index`` (from :func:`build_index`) and ``truth`` (from :func:`layer_truth`) are made where not given.
    With ``precision`` the policy indexes, selects from and attends keys and values held in it (an ``index``
    that is given must be built on ``quantised(layer, precision, prompt_length)``), and the bytes of tokens
    are those stored; the truth stays in full precision, ``mass`` and recall are full precision's of the
    tokens selected.
    """
    held = layer if precision is None else quantised(layer, precision, prompt_length)
    started = time.perf_counter()
    if index is None:
        index = build_index(policy, held, prompt_length)
    build_seconds = time.perf_counter() - started
    truth = layer_truth(layer) if truth is None else truth
    steps = decode_queries(held)
    recorded = steps if held is layer else decode_queries(layer)
    columns = _Columns()
    ranked: list[Tensor] = []
    accesses: list[list[UnitAccesses]] = [[] for _ in range(layer.keys.shape[0])]
    for chunk in chunks(len(steps.positions)):
        selection = policy.select(index, steps.queries[chunk], steps.positions[chunk])
        output, mass = _outcome(layer, held, steps, chunk, selection, truth)
        columns.add("mass", mass.flatten(1))
        columns.add("error", _relative_error(output, truth.outputs[chunk]).flatten(1))
        columns.add("read_bytes", _read_bytes(held, steps.positions[chunk], selection))
        columns.add("scan_bytes", selection.scan_bytes)
        columns.add("effective_tokens", selection.effective_tokens())
        if recall:
            known = None if truth.best is None else truth.best[chunk]
            asked = (recorded.queries[chunk], recorded.positions[chunk])
            index_recall, attention_recall, best = recalls(layer, *asked, selection, known)
            columns.add("recall_index", index_recall.flatten(1))
            columns.add("recall_attention", attention_recall.flatten(1))
            ranked.append(best)
        for head, parts in enumerate(accesses):
            parts.append(unit_accesses(selection, head, prompt_length))
    if ranked and truth.best is None:
        truth.best = torch.cat(ranked)
    return LayerEvaluation(
        policy=policy,
        layer=layer.info,
        positions=steps.positions.cpu(),
        **columns.joined(),
        accesses=[join_accesses(parts, prompt_length) for parts in accesses],
        build_seconds=build_seconds,
    )


def access_log(
    trace: Trace,
    policy: Policy | Plan,
    layers: list[int] | None = None,
    progress: Progress | None = None,
) -> AccessLog:
    """What ``policy`` asks of the cache on every unit of ``trace`` (windowed, dense layers: nothing)."""
    plan = as_plan(policy)
    layers = list(trace.layers) if layers is None else layers
    log = AccessLog(page_bytes=trace.geometry.layer(0).page_bytes)
    timelines = [timeline for sample in range(trace.n_samples) for timeline in trace.timelines(sample)]
    with (progress or silent).task("selecting", len(timelines) * len(layers)) as task:
        for timeline in timelines:
            for number in layers:
                for head, unit in enumerate(_layer_accesses(plan, timeline, number)):
                    log.units[timeline.sample, timeline.index, number, trace.kv_heads[head]] = unit
                task.advance()
    return log


def _layer_accesses(plan: Plan, timeline: Timeline, number: int) -> list[UnitAccesses]:
    """Accesses of one layer, one entry per kv head."""
    layer = timeline.layer(number)
    policy = plan.for_layer(layer.info)
    index = build_index(policy, layer, timeline.prompt_length)
    steps = decode_queries(layer)
    selections = [
        policy.select(index, steps.queries[c], steps.positions[c]) for c in chunks(len(steps.positions))
    ]
    return [
        join_accesses(
            [unit_accesses(s, head, timeline.prompt_length) for s in selections], timeline.prompt_length
        )
        for head in range(layer.keys.shape[0])
    ]


def _read_bytes(held: TimelineLayer, positions: Tensor, selection: Selection) -> Tensor:
    """Bytes that steps at ``positions`` [t] read, [t, H]."""
    if isinstance(held, QuantisedLayer):
        return held.read_bytes(selection, positions)
    return selection.read_bytes(held.info)


def _outcome(
    layer: TimelineLayer,
    held: TimelineLayer,
    steps: DecodeQueries,
    chunk: slice,
    selection: Selection,
    truth: LayerTruth,
) -> tuple[Tensor, Tensor]:
    """Output [t, H, G, dv] under ``selection`` and the probability of its exact tokens [t, H, G].

    The output is that of the keys and values ``held``, the probability that of the recorded ones.
    """
    heads, width = selection.positions.shape[1:]
    row_bytes = max(1, heads * width * (layer.info.head_dim + layer.info.value_dim) * 4)
    size = max(1, _GATHER_BYTES // row_bytes)
    outputs, masses = [], []
    for part in chunks(chunk.stop - chunk.start, size):
        at = slice(chunk.start + part.start, chunk.start + part.stop)
        queries, positions = steps.queries[at], steps.positions[at]
        chosen = selection.steps(part)
        zones = [exact_zone(queries, positions, layer.keys, layer.values, chosen, layer.info)]
        exact_lse = torch.logsumexp(_unweighted(zones[0].logits, selection, part), -1)
        if isinstance(held, QuantisedLayer):
            zones = [held.exact_zone(zones[0], queries, positions, chosen)]
        if selection.estimated is not None and selection.clusters is not None:
            estimated = selection.estimated[part]
            zones.append(estimation_zone(queries, positions, selection.clusters, estimated, layer.info))
        outputs.append(merge_zones(zones, layer.info)[0])
        masses.append(torch.exp(exact_lse - truth.lse[at]).clamp(max=1.0))
    return torch.cat(outputs), torch.cat(masses)


def _unweighted(logits: Tensor, selection: Selection, part: slice) -> Tensor:
    """Logits without importance weights: a token is covered or it is not (-inf where it is not)."""
    if selection.log_weights is None:
        return logits
    weights = selection.log_weights[part]
    return torch.where(weights == -math.inf, -math.inf, logits - weights)


def _relative_error(output: Tensor, exact: Tensor) -> Tensor:
    """‖o − o_full‖ / ‖o_full‖ over the last dimension."""
    norm = torch.linalg.vector_norm(exact, dim=-1)
    return torch.linalg.vector_norm(output - exact, dim=-1) / norm.clamp_min(1e-30)


@dataclass
class _Columns:
    """Per-step tensors gathered chunk by chunk."""

    parts: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        self.parts.setdefault(name, []).append(value)

    def joined(self) -> dict[str, Tensor]:
        names = (
            "recall_index",
            "recall_attention",
            "mass",
            "error",
            "read_bytes",
            "scan_bytes",
            "effective_tokens",
        )
        return {
            name: torch.cat(self.parts[name]).cpu() if name in self.parts else torch.empty(0)
            for name in names
        }
