"""Index builds over one kv head's keys: kvtune's k-means and Faiss's kinds, on a GPU and on the CPU.

32,768 bf16 keys of dimension 128 around a few hundred directions of uneven popularity. k-means' peer is
Faiss's own k-means on the same device; flat and IVF on a GPU stand beside the same index built on the CPU by
one thread; HNSW and PQ lie on the CPU in any case. Recall is that of the 100 best inner products of 64
queries, at each index's defaults.

Run from the repository root: ``PYTHONPATH=. python benchmarks/index_builds.py --device cuda``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import record as recording
import torch
from torch import Tensor

from kvtune.clustering import segmented_kmeans
from kvtune.clustering.faiss_index import FaissIndex, load_faiss
from kvtune.clustering.key_index import IndexSpec

DIM, QUERIES, K = 128, 64, 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    if out := os.environ.get("OUT"):
        recording.RESULTS = Path(out)
    keys, queries = drifting(options.tokens)
    best = set_of((queries.float() @ keys.float().T).topk(K, 1).indices)
    if options.device != "cpu":
        torch.ones(64, 64, device=options.device) @ torch.ones(64, 64, device=options.device)
    rows = [kmeans_row(keys, options.device)]
    for kind in ("flat", "ivf", "hnsw", "pq"):
        rows.append(faiss_row(kind, keys, queries, best, options.device))
        path = recording.record(rows, "index_builds")
    print(recording.table(rows))
    print(f"wrote {path}")


def drifting(tokens: int) -> tuple[Tensor, Tensor]:
    """Keys [N, d] around uneven directions, and queries [Q, d] near some of them."""
    generator = torch.Generator().manual_seed(1)
    directions = 4 * torch.randn(300, DIM, generator=generator) / DIM**0.25
    popular = torch.rand(tokens, generator=generator).pow(3).mul(300).long()
    keys = (directions[popular] + torch.randn(tokens, DIM, generator=generator)).bfloat16()
    near = directions[torch.randint(300, (QUERIES,), generator=generator)]
    return keys, (near + torch.randn(QUERIES, DIM, generator=generator)).bfloat16()


def kmeans_row(keys: Tensor, device: str) -> dict[str, Any]:
    """Spherical k-means of all keys into one cluster per 16, 10 passes, without segments."""
    there, clusters = keys[None].to(device), len(keys) // 16
    faiss, rows = load_faiss(), keys.float().numpy()

    def peer() -> None:
        faiss.Kmeans(
            DIM, clusters, niter=10, spherical=True, gpu=int(device != "cpu"), min_points_per_centroid=1,
            max_points_per_centroid=len(rows),
        ).train(rows)  # fmt: skip

    ours = seconds(lambda: segmented_kmeans(there, clusters, 1), device, repeats=3)
    named = "Faiss k-means, " + ("one GPU" if device != "cpu" else "CPU")
    return row("kmeans", device, ours, named, seconds(peer, device, repeats=2), keys)


def faiss_row(kind: str, keys: Tensor, queries: Tensor, best: list[set[int]], device: str) -> dict[str, Any]:
    spec, made = IndexSpec.of(kind), {}

    def build(where: str) -> Callable[[], None]:
        return lambda: made.update({where: FaissIndex.build(keys, spec, where)})

    where = device if kind in ("flat", "ivf") else "cpu"
    time = seconds(build(where), device, repeats=1 if where == "cpu" else 2)
    peer = seconds(build("cpu"), "cpu") if where != "cpu" else None
    found = made[where].search(queries, K).ids
    recall = float(np.mean([len(set(ids) & want) / K for ids, want in zip(found.tolist(), best)]))
    named = None if peer is None else "Faiss, CPU, one thread"
    return {**row(kind, where, time, named, peer, keys), "recall_at_100": recall, "notes": made[where].notes}


def row(
    kind: str, where: str, value: float, named: str | None, peer: float | None, keys: Tensor
) -> dict[str, Any]:
    return {
        "name": f"index_build_{kind}", "value": value, "unit": "s", "peer": named, "peer_value": peer,
        "ratio": None if peer is None else peer / value, "device": where, "shape": list(keys.shape),
    }  # fmt: skip


def set_of(ids: Tensor) -> list[set[int]]:
    return [set(found) for found in ids.tolist()]


def seconds(body: Callable[[], object], device: str, repeats: int = 1) -> float:
    """The best of ``repeats`` calls; where there are several, one more goes before."""
    times = []
    for _ in range(repeats + (repeats > 1)):
        started = perf_counter()
        body()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    main()
