"""The hot steps of k-means in plain batched torch: any device, and the peer the others are timed against."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 4096


def prepare(keys: Tensor, mean: Tensor) -> Tensor:
    """Centred keys in the keys' own dtype."""
    return (keys.float() - mean).to(keys.dtype)


def refine(keys: Tensor, centroids: Tensor, passes: int) -> Tensor:
    """``passes`` × (assign, move to the mean, normalise): keys [B, n, d], centroids [B, c, d] float32."""
    for _ in range(passes):
        assignment = assign(keys, centroids)
        centroids = move(keys, centroids, assignment)
    return centroids


def assign(keys: Tensor, centroids: Tensor) -> Tensor:
    """Best centroid by inner product: [B, n, d], [B, c, d] → [B, n] int64."""
    columns = centroids.to(keys.dtype).transpose(1, 2)
    return torch.cat([torch.bmm(block, columns).argmax(2) for block in keys.split(_BLOCK, 1)], 1)


def move(keys: Tensor, centroids: Tensor, assignment: Tensor) -> Tensor:
    """Normalised means of the clusters; an empty cluster keeps its centroid."""
    sums = cluster_sums(keys, assignment, centroids.shape[1])
    means = torch.nn.functional.normalize(sums, dim=-1, eps=torch.finfo(sums.dtype).tiny)
    return torch.where(_nonempty(assignment, centroids.shape[1]), means, centroids)


def cluster_sums(values: Tensor, assignment: Tensor, n_centroids: int) -> Tensor:
    """Float32 sum of each cluster: [H, N, dv], [H, N] → [H, C, dv]."""
    heads, _, width = values.shape
    sums = torch.zeros(heads * n_centroids, width, dtype=torch.float32, device=values.device)
    sums.index_add_(0, _flat(assignment, n_centroids), values.float().flatten(0, 1))
    return sums.view(heads, n_centroids, width)


def _nonempty(assignment: Tensor, n_centroids: int) -> Tensor:
    heads = assignment.shape[0]
    present = torch.zeros(heads * n_centroids, dtype=torch.bool, device=assignment.device)
    present[_flat(assignment, n_centroids)] = True
    return present.view(heads, n_centroids, 1)


def _flat(assignment: Tensor, n_centroids: int) -> Tensor:
    first = torch.arange(assignment.shape[0], device=assignment.device)[:, None] * n_centroids
    return (assignment + first).flatten()
