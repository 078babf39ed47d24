"""Which code runs the hot steps of k-means on a tensor's device: numba, Triton or plain torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

from torch import Tensor


class Backend(Protocol):
    """The hot steps. Keys [H, N, d] of any floating dtype are centred by mean [H, 1, d] float32."""

    def refine(self, keys: Tensor, mean: Tensor, centroids: Tensor, n_segments: int, passes: int) -> Tensor:
        """``passes`` × (assign, move to the mean, normalise) within each segment of N // n_segments tokens.

        centroids [H, C, d] float32, C / n_segments of them a segment, in order → moved centroids; an empty
        cluster keeps its centroid.
        """

    def assign(self, keys: Tensor, mean: Tensor, centroids: Tensor) -> Tensor:
        """Best centroid by inner product, ties to the lowest: [H, N, d], [H, C, d] → [H, N] int64."""

    def cluster_sums(self, values: Tensor, assignment: Tensor, sizes: Tensor) -> Tensor:
        """Float32 sum of each cluster: [H, N, dv], [H, N] int64, [H, C] int64 → [H, C, dv]."""


def of(tensor: Tensor) -> Backend:
    """The fastest backend for rows like ``tensor``'s [H, N, d]."""
    if tensor.device.type == "cpu":
        from kvtune.clustering import cpu_kmeans

        return cpu_kmeans
    if tensor.device.type == "cuda" and find_spec("triton"):
        from kvtune.clustering import triton_kmeans

        if triton_kmeans.supports(tensor):
            return triton_kmeans
    from kvtune.clustering import torch_kmeans

    return torch_kmeans
