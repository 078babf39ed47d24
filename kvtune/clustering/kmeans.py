"""Segmented spherical k-means over the keys of a layer, as RetroInfer's wave index builds it.

Source: RetroInfer (arXiv 2505.02922), ``segment_k_means`` of microsoft/RetrievalAttention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.clustering.grouping import cluster_sizes, cluster_sums
from kvtune.errors import InputError

_BLOCK = 4096


@dataclass(frozen=True)
class Clustering:
    """Clusters of H kv heads.

    centroids [H, C, d] float32, assignment [H, N] int64 (the cluster of each token), sizes [H, C] int64
    (0 where empty).
    """

    centroids: Tensor
    assignment: Tensor
    sizes: Tensor


def segmented_kmeans(
    keys: Tensor,
    n_centroids: int,
    n_segments: int,
    iterations: int = 10,
    centre: bool = True,
    global_pass: bool = True,
) -> Clustering:
    """Cluster keys [H, N, d] (any floating dtype) into ``n_centroids`` per kv head.

    Keys are centred per head and the mean is added back to the centroids. Centroids start as the strided
    keys int((i + 0.5)·N / C). ``iterations - 1`` passes run within each of ``n_segments`` contiguous
    segments of N // n_segments tokens: assign by inner product, move to the mean, normalise. The last pass
    assigns every key to the best of all normalised centroids and moves those to the plain mean. Tokens
    left over by the segments join only this pass. An empty cluster keeps its centroid; ties go to the
    lowest cluster. Sums are float32; deterministic on CPU.

    ``global_pass=False`` keeps the last pass within segments too (leftover tokens go to the last one):
    for measuring what the global pass costs and gives.

    Raises ``InputError`` where the counts do not fit: N ≥ C ≥ 1, C divisible by ``n_segments``.
    """
    _check(keys, n_centroids, n_segments, iterations)
    heads, n, dim = keys.shape
    keys = keys.float()
    mean = keys.mean(1, keepdim=True) if centre else keys.new_zeros(heads, 1, dim)
    keys = keys - mean
    starts = (2 * torch.arange(n_centroids, device=keys.device) + 1) * n // (2 * n_centroids)
    centroids = keys[:, starts]

    length = n // n_segments
    segments = keys[:, : length * n_segments].reshape(heads * n_segments, length, dim)
    centroids = centroids.reshape(heads * n_segments, n_centroids // n_segments, dim)
    for _ in range(iterations - 1):
        centroids, _, _ = _pass(segments, centroids, normalise=True)
    if global_pass:
        centroids = centroids.reshape(heads, n_centroids, dim)
        centroids, assignment, sizes = _pass(keys, centroids, normalise=False)
    else:
        assignment = _assign_local(keys, centroids, n_segments)
        centroids, sizes = _update(keys, centroids.reshape(heads, n_centroids, dim), assignment, False)
    return Clustering(centroids + mean, assignment, sizes)


def _check(keys: Tensor, n_centroids: int, n_segments: int, iterations: int) -> None:
    if keys.ndim != 3 or not keys.is_floating_point():
        raise InputError("keys to cluster must be a floating tensor of shape [heads, tokens, dim]")
    if min(n_centroids, n_segments, iterations) < 1:
        raise InputError("centroids, segments and iterations must each be at least 1")
    if n_centroids % n_segments:
        raise InputError(f"{n_centroids} centroids do not divide into {n_segments} segments")
    if keys.shape[1] < n_centroids:
        raise InputError(f"{keys.shape[1]} tokens are fewer than the {n_centroids} centroids asked for")


def _pass(keys: Tensor, centroids: Tensor, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One assign and update over a batch: keys [B, n, d], centroids [B, c, d]."""
    assignment = _assign(keys, centroids)
    centroids, sizes = _update(keys, centroids, assignment, normalise)
    return centroids, assignment, sizes


def _assign(keys: Tensor, centroids: Tensor) -> Tensor:
    """Best centroid by inner product, lowest index first: [B, n] int64."""
    blocks = [
        torch.bmm(block, centroids.transpose(1, 2)).argmax(2) for block in keys.split(_BLOCK, dim=1)
    ]
    return torch.cat(blocks, 1)


def _assign_local(keys: Tensor, centroids: Tensor, n_segments: int) -> Tensor:
    """Best centroid of each token's own segment, as an index into all of the head's centroids."""
    heads, n, dim = keys.shape
    length, width = n // n_segments, centroids.shape[1]
    segments = keys[:, : length * n_segments].reshape(heads * n_segments, length, dim)
    inside = _assign(segments, centroids).view(heads, n_segments, length)
    inside = inside + width * torch.arange(n_segments, device=keys.device)[:, None]
    last = centroids.view(heads, n_segments, width, dim)[:, -1]
    rest = _assign(keys[:, length * n_segments :], last) + width * (n_segments - 1)
    return torch.cat([inside.flatten(1), rest], 1)


def _update(keys: Tensor, centroids: Tensor, assignment: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    """Means of the clusters (of length 1 if ``normalise``); empty clusters keep their centroid."""
    count = centroids.shape[1]
    sizes = cluster_sizes(assignment, count)
    means = cluster_sums(keys, assignment, count) / sizes.clamp(min=1)[..., None]
    if normalise:
        norms = means.norm(dim=-1, keepdim=True)
        means = means / norms.where(norms > 0, 1.0)
    return torch.where((sizes > 0)[..., None], means, centroids), sizes
