"""What the wave index keeps of one layer: clusters in order of creation, and the dense tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtune.clustering import cluster_sums, members, segmented_kmeans
from kvtune.geometry import LayerInfo
from kvtune.policies import retroinfer
from kvtune.policies.base import Clusters
from kvtune.policies.spans import span_positions


@dataclass
class WaveIndexState:
    """Clusters of one layer, in order of creation: those of the prompt, then 1,024 tokens at a time.

    clusters: centroids [H, C, d] and value sums [H, C, dv] at the model's precision, sizes and spreads [H, C]
    order [H, M]: token positions sorted by cluster; offsets [H, C + 1] into it
    prompt_length: tokens of the prompt; context: those of them that are not pinned
    sink: how many of them are sinks; prompt_end: where its clusters end
    pinned: spans of positions (start, stop) that are in no cluster
    tail_keys [H, n, d], tail_values [H, n, dv]: the dense tail, from position ``tail_start`` on
    """

    layer: LayerInfo
    prompt_length: int
    context: int
    clusters: Clusters
    order: Tensor
    offsets: Tensor
    sink: int
    prompt_end: int
    pinned: tuple[tuple[int, int], ...]
    tail_start: int
    tail_keys: Tensor
    tail_values: Tensor

    @property
    def length(self) -> int:
        """Tokens appended so far, all zones."""
        return self.tail_start + self.tail_keys.shape[1]

    @property
    def grown(self) -> int:
        """Segments added while decoding."""
        return (self.tail_start - self.prompt_end) // retroinfer.UPDATE_TOKENS

    def append(self, keys: Tensor, values: Tensor, local: int, n_centroids: int) -> None:
        """Add tokens to the dense tail; 1,024 that have left the local window become ``n_centroids`` more."""
        self.tail_keys = torch.cat([self.tail_keys, keys], 1)
        self.tail_values = torch.cat([self.tail_values, values], 1)
        step = retroinfer.UPDATE_TOKENS
        while self.tail_keys.shape[1] >= step + local:
            self.add(self.tail_keys[:, :step], self.tail_values[:, :step], self.tail_start, n_centroids, 1)
            self.tail_start += step
            self.tail_keys, self.tail_values = self.tail_keys[:, step:], self.tail_values[:, step:]

    def add(self, keys: Tensor, values: Tensor, start: int, n_centroids: int, n_segments: int) -> None:
        """Cluster the tokens at positions ``start`` … that are not pinned, and append the clusters.

        Where fewer tokens than centroids are left (a decode-made segment that is mostly pinned), the
        clusters that lack tokens stay empty.
        """
        free = torch.arange(start, start + keys.shape[1], device=keys.device)
        pinned = span_positions(self.pinned, start, start + keys.shape[1], keys.device)
        if len(pinned):
            free = free[~torch.isin(free, pinned)]
            keys, values = keys[:, free - start], values[:, free - start]
        count = min(n_centroids, keys.shape[1])
        if count:
            clustering = segmented_kmeans(keys, count, n_segments if count == n_centroids else 1)
            sizes = clustering.sizes
            order, offsets = members(clustering.assignment, sizes)
            centroids = clustering.centroids.to(keys.dtype)
            sums = cluster_sums(values, clustering.assignment, count).to(values.dtype)
            spreads = _spreads(keys, clustering.centroids, clustering.assignment, sizes)
        else:
            sizes = torch.zeros(keys.shape[0], 0, dtype=torch.int64, device=keys.device)
            order, offsets = sizes, sizes.new_zeros(keys.shape[0], 1)
            centroids, sums, spreads = keys, values, sizes.float()
        short = n_centroids - count
        old = self.clusters
        before = old.sizes.float() if old.spreads is None else old.spreads
        self.clusters = Clusters(
            torch.cat([old.centroids, pad(centroids, (0, 0, 0, short))], 1),
            torch.cat([old.sizes, pad(sizes, (0, short))], 1),
            torch.cat([old.value_sums, pad(sums, (0, 0, 0, short))], 1),
            spreads=torch.cat([before, pad(spreads, (0, short))], 1),
        )
        ends = torch.cat([offsets[:, 1:], offsets[:, -1:].expand(-1, short)], 1)
        self.offsets = torch.cat([self.offsets, ends + self.order.shape[1]], 1)
        self.order = torch.cat([self.order, free[order]], 1)


def _spreads(keys: Tensor, centroids: Tensor, assignment: Tensor, sizes: Tensor) -> Tensor:
    """Mean squared distance of each cluster's keys [H, N, d] to their mean, its centroid: [H, C] float32.

    The mean square of the keys less that of their mean.
    """
    squares = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32).square()
    sums = torch.zeros_like(sizes, dtype=torch.float32).scatter_add_(1, assignment, squares)
    spreads = sums / sizes.clamp_min(1) - centroids.float().square().sum(-1)
    return torch.where(sizes > 0, spreads.clamp_min(0), 0.0)
