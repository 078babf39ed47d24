"""Tokens grouped by cluster: member lists and per-cluster sums."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtune.clustering import backends


def members(assignment: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Token lists of all clusters.

    assignment [H, N] int64, sizes [H, C] int64 → order [H, N] int64, offsets [H, C + 1] int64: the tokens
    of cluster c of head h are ``order[h, offsets[h, c] : offsets[h, c + 1]]``, ascending.
    """
    order = torch.argsort(assignment, dim=1, stable=True)
    offsets = torch.nn.functional.pad(sizes.cumsum(1), (1, 0))
    return order, offsets


def cluster_sizes(assignment: Tensor, n_centroids: int) -> Tensor:
    """Tokens per cluster: assignment [H, N] → [H, C] int64."""
    sizes = torch.zeros(assignment.shape[0], n_centroids, dtype=torch.int64, device=assignment.device)
    return sizes.scatter_add_(1, assignment, torch.ones_like(assignment))


def cluster_sums(values: Tensor, assignment: Tensor, n_centroids: int) -> Tensor:
    """Sum of the values of each cluster, accumulated in float32.

    values [H, N, dv] of any dtype, assignment [H, N] int64 in 0…C-1 → [H, C, dv] float32; an empty
    cluster's sum is zero.
    """
    sizes = cluster_sizes(assignment, n_centroids)
    return backends.of(values).cluster_sums(values.detach(), assignment, sizes)
