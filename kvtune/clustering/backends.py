"""Which code runs the two hot steps of k-means on a tensor's device: numba, Triton or plain torch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Backend(Protocol):
    """The hot steps. Keys are what :meth:`prepare` returned, possibly reshaped; centroids are float32."""

    def prepare(self, keys: Tensor, mean: Tensor) -> Tensor:
        """Centred keys in the dtype the backend multiplies in: [H, N, d], mean [H, 1, d] or [1]."""

    def refine(self, keys: Tensor, centroids: Tensor, passes: int) -> Tensor:
        """``passes`` × (assign, move to the mean, normalise) in each of B problems.

        keys [B, n, d], centroids [B, c, d] → centroids [B, c, d]; an empty cluster keeps its centroid.
        """

    def assign(self, keys: Tensor, centroids: Tensor) -> Tensor:
        """Best centroid by inner product, ties to the lowest: [B, n, d], [B, c, d] → [B, n] int64."""

    def cluster_sums(self, values: Tensor, assignment: Tensor, n_centroids: int) -> Tensor:
        """Float32 sum of each cluster: [H, N, dv], [H, N] → [H, C, dv]."""


def of(tensor: Tensor) -> Backend:
    """The fastest backend for ``tensor``'s device."""
    if tensor.device.type == "cpu":
        from kvtune.clustering import cpu_kmeans

        return cpu_kmeans
    from kvtune.clustering import torch_kmeans

    return torch_kmeans
