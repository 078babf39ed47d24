"""What each option of CTkvr changes on a recorded trace: output error, recall, mass and bytes.

Every option is held against the plain method with the same settings, on the same decode steps. Centroids
made by k-means are held against as many last queries; offline centroids are learned from the other samples.
Numbers are means over the layers; ``error_by_layer`` and ``recall_by_layer`` say how they differ. The trace
and the run behind results/ctkvr_options.json:

``kvtune capture smollm2-135m --task code_search --context 4000 --samples 2 --decode 128 --layers
3,9,15,21,27 --out TRACE``; ``python benchmarks/ctkvr_options.py TRACE --layers 3,9,15,21,27 --set top_k=128
rho=256 --interval 32 --cold-start 32``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import record, table

from kvtune.analysis.evaluate import build_index, evaluate, layer_truth, prompt_queries
from kvtune.policies import get_policy
from kvtune.policies.ctkvr_offline import learn_centroids, save_centroids
from kvtune.traces import Timeline, Trace, open_trace

PLAIN = "ctkvr"
OFFLINE = "offline"
MEASURES = (
    "error",
    "recall_index",
    "recall_attention",
    "mass",
    "read_bytes",
    "scan_bytes",
    "effective_tokens",
)


@dataclass(frozen=True)
class Variant:
    """A setting to measure, and the name of the one it is held against."""

    name: str
    parameters: dict[str, Any]
    peer: str | None = PLAIN


def variants(base: dict[str, Any], thinned: int, interval: int, cold: int, length: int) -> list[Variant]:
    """The plain method, its budget and centroid curves, and each option by itself on top of ``base``."""
    few = {"n_centroids": thinned}
    fewer = f"{thinned} last queries"
    changes: list[tuple[str, dict[str, Any], str | None]] = [
        (PLAIN, {}, None),
        *((f"top_k {k}", {"top_k": k}, PLAIN) for k in (128, 256, 512)),
        *((f"n_centroids {c}", {"n_centroids": c}, PLAIN) for c in (512, 768, 1024)),
        (fewer, few, PLAIN),
        ("kmeans", {"centroids": "kmeans", **few}, fewer),
        ("attention_weighted", {"centroids": "attention_weighted", **few}, fewer),
        (OFFLINE, {"centroids": "offline", **few}, fewer),
        ("dynamic", {"dynamic": interval}, PLAIN),
        ("simhash 0.93", {"simhash": 0.93}, PLAIN),
        ("cold_start", {"cold_start": cold}, PLAIN),
        ("position_weights 0.5:1.5", {"position_weights": "0.5:1.5"}, PLAIN),
        ("average_length", {"average_length": length}, PLAIN),
        ("int8", {"int8": True}, PLAIN),
    ]
    return [Variant(name, {**base, **change}, peer) for name, change, peer in changes]


def option_effects(trace: Trace, layers: list[int], chosen: list[Variant]) -> list[dict[str, Any]]:
    """One row a variant, means over all decode steps, heads, ``layers`` and timelines of ``trace``.

    Offline centroids come from the other samples; with one sample only, that row is left out.
    """
    chosen = [variant for variant in chosen if variant.name != OFFLINE or trace.n_samples > 1]
    sums: dict[str, dict[int, dict[str, list[float]]]] = {
        variant.name: {layer: {m: [0.0, 0.0] for m in MEASURES} for layer in layers} for variant in chosen
    }
    for timeline, layer, learned in _units(trace, layers, chosen):
        vectors = timeline.layer(layer)
        truth, indexes = layer_truth(vectors), {}
        for variant in chosen:
            file = {"offline": str(learned)} if variant.name == OFFLINE else {}
            policy = get_policy("ctkvr", {**variant.parameters, **file})
            key = policy.build_key()
            if key not in indexes:
                indexes[key] = build_index(policy, vectors, timeline.prompt_length)
            found = evaluate(policy, vectors, timeline.prompt_length, index=indexes[key], truth=truth)
            for name in MEASURES:
                values, into = getattr(found, name).double(), sums[variant.name][layer][name]
                into[0] += float(values.sum())
                into[1] += values.numel()
    by_layer = {
        name: {
            layer: {m: into[m][0] / max(into[m][1], 1.0) for m in MEASURES} for layer, into in found.items()
        }
        for name, found in sums.items()
    }
    return [_row(variant, by_layer) for variant in chosen]


def _units(trace: Trace, layers: list[int], chosen: list[Variant]) -> Iterator[tuple[Timeline, int, Path]]:
    """Timelines and layers, with the file of centroids learned from the other samples."""
    wanted = [variant for variant in chosen if variant.name == OFFLINE]
    with tempfile.TemporaryDirectory() as folder:
        for sample in range(trace.n_samples):
            path = Path(folder) / f"without_{sample}.npz"
            if wanted:
                policy = get_policy(
                    "ctkvr", {k: v for k, v in wanted[0].parameters.items() if k != "centroids"}
                )
                others = [s for s in range(trace.n_samples) if s != sample]
                save_centroids(path, {layer: _learned(trace, others, layer, policy) for layer in layers})
            for timeline in trace.timelines(sample):
                for layer in layers:
                    yield timeline, layer, path


def _learned(trace: Trace, samples: list[int], layer: int, policy: Any) -> Any:
    """Centroids of one layer from the last prompt queries of the first timeline of each sample."""
    queries = []
    for sample in samples:
        timeline = trace.timelines(sample)[0]
        queries.append(prompt_queries(timeline.layer(layer), timeline.prompt_length, policy.query_window))
    return learn_centroids(queries, policy.n_centroids)


def _mean(by_layer: dict[int, dict[str, float]]) -> dict[str, float]:
    return {m: sum(found[m] for found in by_layer.values()) / len(by_layer) for m in MEASURES}


def _row(variant: Variant, measured: dict[str, dict[int, dict[str, float]]]) -> dict[str, Any]:
    by_layer = measured[variant.name]
    own = _mean(by_layer)
    peer = _mean(measured[variant.peer]) if variant.peer else None
    return {
        "name": f"ctkvr_{variant.name}" if variant.name != PLAIN else PLAIN,
        "value": own["error"],
        "unit": "relative output error",
        "peer": variant.peer,
        "peer_value": None if peer is None else peer["error"],
        "ratio": None if peer is None or not own["error"] else peer["error"] / own["error"],
        "parameters": variant.parameters,
        **{name: own[name] for name in MEASURES if name != "error"},
        "error_by_layer": {str(layer): found["error"] for layer, found in by_layer.items()},
        "recall_by_layer": {str(layer): found["recall_attention"] for layer, found in by_layer.items()},
        **({} if peer is None else _changes(own, peer)),
    }


def _changes(own: dict[str, float], peer: dict[str, float]) -> dict[str, float]:
    """Recall in shares gained; error and bytes relative to the peer's."""
    recalls = {f"{name}_change": own[name] - peer[name] for name in ("recall_index", "recall_attention")}
    ratios = {f"{n}_ratio": own[n] / max(peer[n], 1e-30) for n in ("error", "read_bytes", "scan_bytes")}
    return {**recalls, **ratios}


def effects(rows: list[dict[str, Any]]) -> str:
    """Recall and bytes of every row beside those of its peer, which :func:`record.table` leaves out."""
    lines = [f"{'':30} {'error':>7} {'recall':>7} {'change':>7} {'read':>6} {'scan':>6}"]
    for row in rows:
        change = row.get("recall_attention_change", 0.0)
        lines.append(
            f"{row['name']:30} {row['value']:7.4f} {row['recall_attention']:7.3f} {change:+7.3f} "
            f"{row.get('read_bytes_ratio', 1.0):5.2f}x {row.get('scan_bytes_ratio', 1.0):5.2f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--layers", default="", help="layers such as 5,15,25 (default: all of the trace)")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of every variant"
    )
    parser.add_argument("--thinned", type=int, default=256, help="centroids that k-means keeps")
    parser.add_argument("--interval", type=int, default=1000, help="decode steps between splits and merges")
    parser.add_argument("--cold-start", type=int, default=200)
    parser.add_argument("--average-length", type=int, help="default: half of the mean prompt")
    options = parser.parse_args()
    trace = open_trace(options.trace)
    layers = [int(part) for part in options.layers.split(",")] if options.layers else list(trace.layers)
    base = dict(part.split("=", 1) for part in options.set)
    timelines = [t for s in range(trace.n_samples) for t in trace.timelines(s)]
    mean = round(sum(t.prompt_length for t in timelines) / len(timelines))
    later = max(len(t.token_ids) - t.prompt_length for t in timelines)
    average = options.average_length or mean // 2
    chosen = variants(base, options.thinned, options.interval, options.cold_start, average)
    rows = option_effects(trace, layers, chosen)
    for row in rows:
        row.update(model=trace.model, prompt_tokens=mean, later_tokens=later, layers=layers)
    print(table(rows))
    print(effects(rows))
    print(f"wrote {record(rows, 'ctkvr_options')}")


if __name__ == "__main__":
    main()
