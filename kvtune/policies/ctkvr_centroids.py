"""CTkvr option ``centroids``: query centroids that k-means makes out of more queries than it keeps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvtune.clustering import cluster_sums
from kvtune.geometry import LayerInfo
from kvtune.policies.ctkvr_lists import probabilities

ITERATIONS = 10


def kmeans_centroids(queries: Tensor, count: int, weights: Tensor | None = None) -> Tensor:
    """Means of spherical clusters of grouped queries: [H, W, G, d] → [H, min(count, W), G, d].

    Assignment is by :func:`~kvtune.policies.ctkvr_lists.nearest`'s similarity; ``weights`` [H, W] say how
    much each query pulls (default: alike). Starts at strided queries, 10 passes; the centroids are the
    weighted means of the queries as they are, so that they score keys as a query would. An empty cluster
    keeps the query it started from. Float32, deterministic on CPU.
    """
    heads, n, group, dim = queries.shape
    count = min(count, n)
    unit = normalize(queries.float(), dim=-1).flatten(2)
    pull = torch.ones(heads, n, device=queries.device) if weights is None else weights.float()
    # A query that pulls nothing at all would leave its cluster without a mean.
    pull = pull.clamp_min(1e-6)[..., None]
    starts = (2 * torch.arange(count, device=queries.device) + 1) * n // max(2 * count, 1)
    centroids = unit[:, starts]
    assignment = torch.zeros(heads, n, dtype=torch.int64, device=queries.device)
    for _ in range(ITERATIONS if count else 0):
        assignment = torch.matmul(unit, centroids.transpose(1, 2)).argmax(2)
        sums = cluster_sums(unit * pull, assignment, count)
        norms = sums.norm(dim=-1, keepdim=True)
        centroids = torch.where(norms > 0, sums / norms.clamp_min(1e-30), centroids)
    if not count:
        return queries.float()
    totals = cluster_sums(pull.contiguous(), assignment, count)
    means = cluster_sums(queries.float().flatten(2) * pull, assignment, count) / totals.clamp_min(1e-30)
    return torch.where(totals > 0, means, queries[:, starts].float().flatten(2)).unflatten(2, (group, dim))


def retrieved_mass(queries: Tensor, keys: Tensor, sink: int, local: int, layer: LayerInfo) -> Tensor:
    """The mean over the group of each query's probability outside the steady zone, [H, W].

    queries [H, W, G, d], keys [H, n, d] of the prompt. The weight of ``attention_weighted`` k-means: a query
    that attends only the steady zone needs no list of its own.
    """
    parts = [
        part[..., sink : max(keys.shape[1] - local, sink)].sum(-1).mean(2)
        for part in probabilities(queries, keys, layer)
    ]
    return torch.cat(parts, 1) if parts else queries.new_zeros(queries.shape[:2])
