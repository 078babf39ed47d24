"""Segmented k-means on CPU against faiss-cpu called once per segment.

Both run 10 spherical inner-product iterations on 2 heads of 16,384 keys, 512 centroids per segment of
8,192, from the same normalised start (Faiss normalises it anyway), with 2 threads and no subsampling;
the sum of each key's best score must agree to 0.1%. The whole 9 + 1 build, with its global pass, is
timed beside. Run: ``python benchmarks/kmeans_cpu.py``.
"""

from __future__ import annotations

from typing import Any

import faiss
import torch
from record import best_seconds, best_seconds_of, record, table
from torch import Tensor

from kvtune.clustering import cpu_kmeans, segmented_kmeans

HEADS, SEGMENTS, LENGTH, CENTROIDS, ITERATIONS, THREADS = 2, 2, 8192, 512, 10, 2


def main() -> None:
    torch.set_num_threads(THREADS)
    faiss.omp_set_num_threads(THREADS)
    rows = [row for dim in (64, 128) for row in measure(dim)]
    print(table(rows))
    print(f"wrote {record(rows, 'kmeans_cpu')}")


def measure(dim: int) -> list[dict[str, Any]]:
    """Local iterations against Faiss, taking turns, and the whole build."""
    keys = _keys(dim)
    start = _start(keys)
    mean = torch.zeros(HEADS, 1, dim)

    def ours() -> Tensor:
        return cpu_kmeans.refine(keys, mean, start, SEGMENTS, ITERATIONS)

    def peer() -> Tensor:
        return _faiss(keys, start)

    objective, peer_objective = _objective(keys, ours()), _objective(keys, peer())
    if abs(objective / peer_objective - 1) > 1e-3:
        raise SystemExit(f"objectives differ: {objective:.1f} and {peer_objective:.1f}")
    seconds, peer_seconds = best_seconds_of(ours, peer)
    whole = best_seconds(lambda: segmented_kmeans(keys, SEGMENTS * CENTROIDS, SEGMENTS), repeats=3)
    return [
        {
            "name": f"kmeans_local_cpu_d{dim}",
            "value": seconds,
            "unit": "s",
            "peer": "faiss-cpu, per segment",
            "peer_value": peer_seconds,
            "ratio": peer_seconds / seconds,
            "objective": objective,
            "peer_objective": peer_objective,
        },
        {
            "name": f"kmeans_9plus1_cpu_d{dim}",
            "value": whole,
            "unit": "s",
            "peer": None,
            "peer_value": None,
            "ratio": None,
        },
    ]


def _keys(dim: int) -> Tensor:
    """Centred keys of uneven scale per channel, [HEADS, SEGMENTS·LENGTH, dim]."""
    generator = torch.Generator().manual_seed(dim)
    scale = torch.rand(dim, generator=generator) + 0.5
    return torch.randn(HEADS, SEGMENTS * LENGTH, dim, generator=generator) * scale


def _start(keys: Tensor) -> Tensor:
    step = LENGTH // CENTROIDS
    return torch.nn.functional.normalize(keys[:, step // 2 :: step], dim=-1).contiguous()


def _faiss(keys: Tensor, start: Tensor) -> Tensor:
    found = []
    for head, centroids in zip(keys, start):
        for segment, mine in zip(head.split(LENGTH), centroids.split(CENTROIDS)):
            kmeans = faiss.Kmeans(
                keys.shape[2],
                CENTROIDS,
                niter=ITERATIONS,
                spherical=True,
                max_points_per_centroid=LENGTH,
                min_points_per_centroid=1,
            )
            kmeans.train(segment.numpy(), init_centroids=mine.numpy())
            found.append(torch.from_numpy(kmeans.centroids))
    return torch.stack(found).view(HEADS, -1, keys.shape[2])


def _objective(keys: Tensor, centroids: Tensor) -> float:
    """Sum over all keys of the best score within their segment."""
    segments = keys.view(HEADS * SEGMENTS, LENGTH, -1)
    scores = torch.bmm(segments, centroids.view(HEADS * SEGMENTS, CENTROIDS, -1).transpose(1, 2))
    return float(scores.amax(2).double().sum())


if __name__ == "__main__":
    main()
