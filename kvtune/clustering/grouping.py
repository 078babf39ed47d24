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
    heads = assignment.shape[0]
    first = torch.arange(heads, device=assignment.device)[:, None] * n_centroids
    return torch.bincount((assignment + first).flatten(), minlength=heads * n_centroids).view(heads, -1)


def cluster_sums(values: Tensor, assignment: Tensor, n_centroids: int) -> Tensor:
    """Sum of the values of each cluster, accumulated in float32.

    values [H, N, dv] of any dtype, assignment [H, N] int64 in 0…C-1 → [H, C, dv] float32; an empty
    cluster's sum is zero.
    """
    return backends.of(values).cluster_sums(values.detach(), assignment, n_centroids)
