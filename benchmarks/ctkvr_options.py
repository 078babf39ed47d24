"""What each option of CTkvr changes on a recorded trace: output error, recall, mass and bytes.

Every option is held against the plain method with the same settings, on the same decode steps. Centroids
made by k-means are held against as many last queries; offline centroids are learned from the other samples.
Run: ``python benchmarks/ctkvr_options.py TRACE --layers 5,15,25 --set top_k=128 rho=256``.
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
    sums: dict[str, dict[str, float]] = {variant.name: {} for variant in chosen}
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
                values, into = getattr(found, name).double(), sums[variant.name]
                into[name] = into.get(name, 0.0) + float(values.sum())
                into[f"{name} count"] = into.get(f"{name} count", 0.0) + values.numel()
    means = {
        name: {m: into[m] / max(into[f"{m} count"], 1.0) for m in MEASURES} for name, into in sums.items()
    }
    return [_row(variant, means) for variant in chosen]


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


def _row(variant: Variant, means: dict[str, dict[str, float]]) -> dict[str, Any]:
    own = means[variant.name]
    peer = means[variant.peer] if variant.peer else None
    return {
        "name": f"ctkvr_{variant.name}" if variant.name != PLAIN else PLAIN,
        "value": own["error"],
        "unit": "relative output error",
        "peer": variant.peer,
        "peer_value": None if peer is None else peer["error"],
        "ratio": None if peer is None or not own["error"] else peer["error"] / own["error"],
        "parameters": variant.parameters,
        **{name: own[name] for name in MEASURES if name != "error"},
        **(
            {}
            if peer is None
            else {f"{n}_ratio": own[n] / max(peer[n], 1e-30) for n in ("read_bytes", "scan_bytes")}
        ),
    }


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
    options = parser.parse_args()
    trace = open_trace(options.trace)
    layers = [int(part) for part in options.layers.split(",")] if options.layers else list(trace.layers)
    base = dict(part.split("=", 1) for part in options.set)
    timelines = [t for s in range(trace.n_samples) for t in trace.timelines(s)]
    mean = round(sum(t.prompt_length for t in timelines) / len(timelines))
    later = max(len(t.token_ids) - t.prompt_length for t in timelines)
    chosen = variants(base, options.thinned, options.interval, options.cold_start, mean)
    rows = option_effects(trace, layers, chosen)
    for row in rows:
        row.update(model=trace.model, prompt_tokens=mean, later_tokens=later, layers=layers)
    print(table(rows))
    print(f"wrote {record(rows, 'ctkvr_options')}")


if __name__ == "__main__":
    main()
