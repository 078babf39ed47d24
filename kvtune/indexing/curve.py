"""Recall against cost: an index swept over one parameter, asked by a trace's decode queries."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvtune.analysis.evaluate import decode_queries
from kvtune.clustering.key_index import SEARCH_PARAMETER, IndexSpec
from kvtune.devices import choose_device
from kvtune.errors import InputError
from kvtune.indexing.building import Chosen, build_one, choose, prompt_keys, trace_identity
from kvtune.indexing.store import IndexFolder, KeyIndex
from kvtune.progress import Progress, silent
from kvtune.traces import Timeline, Trace

RECALL_K = 100
Sweep = tuple[str | None, Sequence[int | None]]
"""A parameter and its values; (None, [None]) measures the index as it is."""


@dataclass
class _Point:
    """Sums over queries."""

    hits: float = 0.0
    scanned: int = 0
    seconds: float = 0.0


@dataclass
class _Sums:
    points: dict[int | None, _Point] = field(default_factory=lambda: defaultdict(_Point))
    exact: _Point = field(default_factory=_Point)
    queries: int = 0
    keys: list[int] = field(default_factory=list)
    build_seconds: float = 0.0
    notes: set[str] = field(default_factory=set)


def default_sweep(spec: IndexSpec, n: int, dim: int) -> Sweep:
    """The values worth trying on ``n`` keys: powers of two of nprobe, efSearch from k up, bits that train."""
    if spec.kind == "hnsw":
        return "efSearch", [RECALL_K, 2 * RECALL_K, 4 * RECALL_K, 8 * RECALL_K]
    if spec.kind == "pq":
        return "bits", [bits for bits in (4, 6, 8) if 1 << bits <= n] or [spec.parameters["bits"]]
    if spec.kind == "flat":
        return None, [None]
    lists = spec.fitted(n, dim).parameters["nlist" if spec.kind == "ivf" else "clusters"]
    return "nprobe", [1 << power for power in range(lists.bit_length()) if 1 << power < lists] + [lists]


def recall_curve(
    trace: Trace,
    spec: IndexSpec | None = None,
    sweep: Sweep | None = None,
    *,
    stored: IndexFolder | None = None,
    layers: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
    timelines: Sequence[int] | None = None,
    device: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Recall@100 and cost of an index of the prompt's keys, at each value of one parameter.

    Every query head of every decode step searches the prompt of its timeline. The truth is its exact
    top-100 by inner product among those keys (all of them, if fewer; ties count as found), whatever the
    index's metric. ``spec`` builds an index here; ``stored`` takes a saved one (its layers, samples and
    timelines where none are chosen). A parameter that shapes the index builds one per value.

    Returns ``kind, metric, parameters, k, queries, keys (mean), build_seconds, notes``, ``exact{scan_bytes,
    milliseconds}`` (reading every key; a matrix product and top-k) and ``curve[{parameter, value,
    recall_at_100, scan_bytes, milliseconds}]``: means per query; milliseconds are this machine's, Python
    included. Raises ``InputError`` for unknown parameters, choices that the trace lacks, a ``stored``
    index of another trace, or a trace without decode queries.
    """
    chosen, place = choose(trace, layers, samples, timelines), choose_device(device)
    if stored is not None:
        if stored.manifest["trace"] != trace_identity(trace):
            raise InputError(f"'{stored.path}' was not built from this trace", "build it again from it")
        spec = stored.spec
        if layers is None and samples is None and timelines is None:
            chosen = _held(chosen, stored)
    if spec is None:
        raise ValueError("recall_curve needs a spec or a stored index")
    first, layer = chosen.pairs[0]
    name, values = sweep or _swept(spec, stored, first, trace.layer_info(layer).head_dim)
    specs = {value: spec if name is None else spec.changed({name: value}) for value in values}
    if stored is not None and name not in (None, SEARCH_PARAMETER.get(spec.kind)):
        raise InputError(f"{name} is fixed in a saved index", "sweep it with --kind instead of --index")
    sums = _Sums()
    with (progress or silent).task("searching", len(chosen.pairs)) as task:
        for timeline, layer in chosen:
            _measure(chosen, timeline, layer, specs, stored, (place, seed), sums)
            task.advance()
    if not sums.queries:
        raise InputError("this trace holds no decode queries to ask an index with")
    return _document(spec, name, sums)


def _held(chosen: Chosen, stored: IndexFolder) -> Chosen:
    """Of all pairs, those that the saved index has."""
    held = {unit[:3] for unit in stored.entries}
    pairs = [pair for pair in chosen if (pair[0].sample, pair[0].index, pair[1]) in held]
    return Chosen(chosen.trace, pairs)


def _swept(spec: IndexSpec, stored: IndexFolder | None, timeline: Timeline, dim: int) -> Sweep:
    if stored is not None and spec.kind not in SEARCH_PARAMETER:
        return None, [None]
    return default_sweep(spec, timeline.prompt_length, dim)


def _measure(
    chosen: Chosen,
    timeline: Timeline,
    layer: int,
    specs: dict[int | None, IndexSpec],
    stored: IndexFolder | None,
    building: tuple[torch.device, int],
    sums: _Sums,
) -> None:
    """Every kv head of one layer, at every value."""
    asked = decode_queries(timeline.layer(layer)).queries
    if not len(asked):
        return
    for head, (unit, keys) in enumerate(zip(chosen.units(timeline, layer), prompt_keys(timeline, layer))):
        queries = asked[:, head].flatten(0, 1)
        index: KeyIndex | None = stored.load(unit) if stored is not None else None
        scores = _truth(queries, keys, sums)
        for value, spec in specs.items():
            if index is None or not _searches(index, spec):
                started = time.perf_counter()
                index = build_one(keys, spec, *building)
                sums.build_seconds += time.perf_counter() - started
            sums.notes.update(index.notes)
            _ask(index, queries, scores, spec, sums.points[value])


def _searches(index: KeyIndex, spec: IndexSpec) -> bool:
    """Whether ``index`` answers for ``spec`` without being built anew."""
    name = SEARCH_PARAMETER.get(spec.kind)
    fitted = spec.fitted(len(index), index.dim).parameters
    return all(fitted[key] == index.spec.parameters[key] for key in fitted if key != name)


def _truth(queries: Tensor, keys: Tensor, sums: _Sums) -> Tensor:
    """Exact inner products [Q, N] float32; counts the query and what exact search costs."""
    started = time.perf_counter()
    scores = queries.float() @ keys.float().T
    torch.topk(scores, min(RECALL_K, len(keys)), dim=1)
    sums.exact.seconds += time.perf_counter() - started
    sums.exact.scanned += len(queries) * keys.numel() * keys.element_size()
    sums.queries += len(queries)
    sums.keys.append(len(keys))
    return scores


def _ask(index: KeyIndex, queries: Tensor, scores: Tensor, spec: IndexSpec, point: _Point) -> None:
    k = min(RECALL_K, scores.shape[1])
    name = SEARCH_PARAMETER.get(spec.kind)
    changes = {} if name is None else {name: spec.parameters[name]}
    started = time.perf_counter()
    found = index.search(queries, k, changes)
    point.seconds += time.perf_counter() - started
    ids = torch.from_numpy(found.ids)
    least = torch.topk(scores, k, dim=1).values[:, -1:]
    right = (torch.gather(scores, 1, ids.clamp_min(0)) >= least) & (ids >= 0)
    point.hits += float(right.sum()) / k
    point.scanned += int(found.scan_bytes.sum())


def _document(spec: IndexSpec, name: str | None, sums: _Sums) -> dict[str, Any]:
    def cost(point: _Point) -> dict[str, float]:
        return {
            "scan_bytes": point.scanned / sums.queries,
            "milliseconds": 1000 * point.seconds / sums.queries,
        }

    return {
        "kind": spec.kind,
        "metric": spec.metric,
        "parameters": dict(spec.parameters),
        "k": RECALL_K,
        "queries": sums.queries,
        "keys": sum(sums.keys) / len(sums.keys),
        "build_seconds": sums.build_seconds,
        "notes": sorted(sums.notes),
        "exact": cost(sums.exact),
        "curve": [
            {"parameter": name, "value": value, "recall_at_100": point.hits / sums.queries, **cost(point)}
            for value, point in sums.points.items()
        ],
    }
