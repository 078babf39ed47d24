"""Segmented spherical k-means over the keys of a layer, as RetroInfer's wave index builds it.

Source: RetroInfer (arXiv 2505.02922) and its code, microsoft/RetrievalAttention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.clustering import backends
from kvtune.clustering.grouping import cluster_sizes
from kvtune.errors import InputError


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

    Keys are centred per head (``centre``) and the mean is added back to the centroids. Centroids start as
    the strided keys int((i + 0.5)·N / C). ``iterations - 1`` passes run within each of ``n_segments``
    contiguous segments of N // n_segments tokens: assign by inner product, move to the mean, normalise.
    The last pass assigns every key to the best of all these normalised centroids and makes the centroids
    plain means. Tokens left over by the segments join only this pass. An empty cluster keeps its
    centroid; ties go to the lowest cluster. Sums are float32; deterministic on CPU. On a GPU the products
    are of 16-bit operands and the order of sums varies.

    ``global_pass=False`` keeps the last pass within segments too (leftover tokens join the last one), to
    measure what the global pass costs and gives.

    Raises ``InputError`` where the counts do not fit: N ≥ C ≥ 1, C divisible by ``n_segments``.
    """
    _check(keys, n_centroids, n_segments, iterations)
    keys = keys.detach()
    heads, n, dim = keys.shape
    mean = (
        keys.mean(1, keepdim=True, dtype=torch.float32) if centre else keys.new_zeros(heads, 1, dim).float()
    )
    starts = (2 * torch.arange(n_centroids, device=keys.device) + 1) * n // (2 * n_centroids)
    backend = backends.of(keys)
    centroids = backend.refine(keys, mean, keys[:, starts].float() - mean, n_segments, iterations - 1)
    if global_pass:
        assignment = backend.assign(keys, mean, centroids)
    else:
        assignment = _assign_local(backend, keys, mean, centroids, n_segments)
    sizes = cluster_sizes(assignment, n_centroids)
    means = backend.cluster_sums(keys, assignment, sizes) / sizes.clamp(min=1)[..., None]
    return Clustering(torch.where(sizes[..., None] > 0, means, centroids + mean), assignment, sizes)


def _check(keys: Tensor, n_centroids: int, n_segments: int, iterations: int) -> None:
    if keys.ndim != 3 or not keys.is_floating_point():
        raise InputError("keys to cluster must be a floating-point tensor of shape [heads, tokens, dim]")
    if min(n_centroids, n_segments, iterations) < 1:
        raise InputError("centroids, segments and iterations must each be at least 1")
    if n_centroids % n_segments:
        raise InputError(f"{n_centroids} centroids do not divide into {n_segments} segments")
    if keys.shape[1] < n_centroids:
        raise InputError(f"{keys.shape[1]} tokens are fewer than the {n_centroids} centroids asked for")


def _assign_local(
    backend: backends.Backend, keys: Tensor, mean: Tensor, centroids: Tensor, n_segments: int
) -> Tensor:
    """Best centroid of each token's own segment, as an index into all of the head's centroids."""
    length, width = keys.shape[1] // n_segments, centroids.shape[1] // n_segments
    parts = []
    for s in range(n_segments):
        end = (s + 1) * length if s + 1 < n_segments else keys.shape[1]
        mine = centroids[:, s * width : (s + 1) * width]
        parts.append(backend.assign(keys[:, s * length : end], mean, mine) + s * width)
    return torch.cat(parts, 1)
