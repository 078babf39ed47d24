"""The hot steps of k-means in plain batched torch: any device, and a peer the others are timed against."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 4096


def refine(keys: Tensor, mean: Tensor, centroids: Tensor, n_segments: int, passes: int) -> Tensor:
    """``passes`` × (assign, move to the mean, normalise) within each segment: see ``backends.Backend``."""
    heads, n, dim = keys.shape
    length, n_centroids = n // n_segments, centroids.shape[1]
    centred = _centre(keys, mean)[:, : length * n_segments].reshape(heads * n_segments, length, dim)
    centroids = centroids.reshape(heads * n_segments, n_centroids // n_segments, dim)
    for _ in range(passes):
        centroids = _move(centred, centroids, _assign(centred, centroids))
    return centroids.reshape(heads, n_centroids, dim)


def assign(keys: Tensor, mean: Tensor, centroids: Tensor) -> Tensor:
    """Best centroid by inner product with the centred keys: [H, N, d], [H, C, d] → [H, N] int64."""
    return _assign(_centre(keys, mean), centroids)


def cluster_sums(values: Tensor, assignment: Tensor, sizes: Tensor) -> Tensor:
    """Float32 sum of each cluster: [H, N, dv], [H, N], [H, C] → [H, C, dv]."""
    heads, _, width = values.shape
    sums = torch.zeros(sizes.numel(), width, dtype=torch.float32, device=values.device)
    first = torch.arange(heads, device=values.device)[:, None] * sizes.shape[1]
    sums.index_add_(0, (assignment + first).flatten(), values.float().flatten(0, 1))
    return sums.view(heads, -1, width)


def _centre(keys: Tensor, mean: Tensor) -> Tensor:
    return (keys.float() - mean).to(keys.dtype)


def _assign(centred: Tensor, centroids: Tensor) -> Tensor:
    columns = centroids.to(centred.dtype).transpose(1, 2)
    return torch.cat([torch.bmm(block, columns).argmax(2) for block in centred.split(_BLOCK, 1)], 1)


def _move(centred: Tensor, centroids: Tensor, assignment: Tensor) -> Tensor:
    sizes = torch.zeros(centroids.shape[:2], dtype=torch.int64, device=centred.device)
    sizes.scatter_add_(1, assignment, torch.ones_like(assignment))
    sums = cluster_sums(centred, assignment, sizes)
    norms = sums.norm(dim=-1, keepdim=True)
    return torch.where((sizes > 0)[..., None], sums / norms.where(norms > 0, 1.0), centroids)
