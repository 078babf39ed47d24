"""ClusterKV: cosine clusters of keys, retrieved by q·centroid until a token budget is spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvtune.clustering import cluster_sums, members, segmented_kmeans
from kvtune.geometry import PAGE_TOKENS, LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.layout import Blocks, best_blocks, cluster_tokens, per_head, retrieval, steady_zone

TOKENS_PER_CLUSTER = 80
"""The paper's L/80 clusters for a prompt of L tokens."""


@dataclass
class KeyClusters:
    """Clusters in order of creation: those of the prompt, then ``update_nlist`` per ``update_interval``.

    centroids [H, C, d], sizes [H, C] (0: empty); order [H, M], token positions sorted by cluster, with
    offsets [H, C + 1]; first: clusters of the prompt; sink, prompt_end: where these clusters' tokens lie;
    tail [H, n, d]: keys of later tokens not yet clustered.
    """

    layer: LayerInfo
    centroids: Tensor
    sizes: Tensor
    order: Tensor
    offsets: Tensor
    first: int
    sink: int
    prompt_end: int
    tail: Tensor


@dataclass(frozen=True)
class ClusterKV(Policy):
    """Retrieve the clusters of largest q·centroid, ``token_budget`` (1024) tokens in all, the last one cut.

    All prompt keys after the ``sink`` (16) first are clustered by cosine into ``nlist`` (400) clusters, or
    one per 80 tokens (the paper's L/80) where the prompt is shorter than that; ``iterations`` (10) passes
    from strided keys. Later tokens stay resident until ``update_interval`` (320) have gathered, which then
    form ``update_nlist`` (4) clusters of their own. Sinks and resident tokens come on top of the
    budget. A cut cluster gives its earliest tokens. Where all clustered tokens fit the budget, nothing is
    scored; otherwise a step reads every centroid and its 4-byte size.

    Differences: the paper ranks per query head; here the query heads of a group share clusters, by the sum
    of their q·centroid. While clusters form, means are of normalised keys (spherical k-means); the
    final centroids are the plain means of their keys, as in the paper. ALiBi is left out of the
    score. A layer with a window of its own is refused.
    """

    token_budget: int = 1024
    nlist: int = 400
    sink: int = 16
    update_interval: int = 320
    update_nlist: int = 4
    iterations: int = 10

    name: ClassVar[str] = "clusterkv"
    title: ClassVar[str] = "ClusterKV"
    source: ClassVar[str] = "Liu et al., arXiv 2412.03213"
    budget: ClassVar[str | None] = "token_budget"

    def __post_init__(self) -> None:
        check(self.sink >= 0, self, f"sink must be 0 or more, not {self.sink}")
        for name in ("token_budget", "nlist", "update_interval", "update_nlist", "iterations"):
            check(getattr(self, name) >= 1, self, f"{name} must be 1 or more, not {getattr(self, name)}")
        check(self.update_nlist <= self.update_interval, self, "update_nlist cannot exceed update_interval")

    def build_key(self) -> tuple[Any, ...]:
        return (self.nlist, self.sink, self.update_interval, self.update_nlist, self.iterations)

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> KeyClusters:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        heads, n, _ = keys.shape
        sink = min(self.sink, n)
        none = torch.zeros(heads, 0, dtype=torch.int64, device=keys.device)
        index = KeyClusters(
            layer=layer,
            centroids=keys[:, :0],
            sizes=none,
            order=none,
            offsets=none.new_zeros(heads, 1),
            first=0 if n == sink else min(self.nlist, max((n - sink) // TOKENS_PER_CLUSTER, 1)),
            sink=sink,
            prompt_end=n,
            tail=keys[:, n:],
        )
        if index.first:
            self._add(index, keys[:, sink:], index.first)
        return index

    def append(self, index: KeyClusters, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        index.tail = torch.cat([index.tail, keys], 1)
        while index.tail.shape[1] >= self.update_interval:
            self._add(index, index.tail[:, : self.update_interval], self.update_nlist)
            index.tail = index.tail[:, self.update_interval :]

    def _add(self, index: KeyClusters, keys: Tensor, count: int) -> None:
        """Cluster the tokens that follow those already clustered."""
        unit = normalize(keys.float(), dim=-1).to(keys.dtype)
        clustering = segmented_kmeans(unit, count, 1, self.iterations, centre=False)
        sums = cluster_sums(keys, clustering.assignment, count)
        centroids = (sums / clustering.sizes.clamp_min(1)[..., None]).to(keys.dtype)
        order, offsets = members(clustering.assignment, clustering.sizes)
        done = index.order.shape[1]
        index.centroids = torch.cat([index.centroids, centroids], 1)
        index.sizes = torch.cat([index.sizes, clustering.sizes], 1)
        index.order = torch.cat([index.order, order + index.sink + done], 1)
        index.offsets = torch.cat([index.offsets, offsets[:, 1:] + done], 1)

    def select(self, index: KeyClusters, queries: Tensor, positions: Tensor) -> Selection:
        heads, layer = queries.shape[1], index.layer
        grown = (positions - index.prompt_end).clamp_min(0) // self.update_interval
        visible = index.first + grown * self.update_nlist
        tail = index.prompt_end + grown * self.update_interval
        scores = torch.einsum("thgd,hcd->thc", queries.float(), index.centroids.float())
        present = torch.arange(scores.shape[2], device=queries.device) < visible[:, None]
        ranked = best_blocks(scores, present[:, None] & (index.sizes > 0), scores.shape[2])
        blocks = self._within_budget(index, ranked)
        tokens = cluster_tokens(blocks.ids, index.order, index.offsets)[..., : self.token_budget]
        spent = tail - index.sink > self.token_budget
        scan = torch.where(spent, visible, 0) * (layer.head_dim * layer.item_bytes + 4)
        steady = steady_zone(positions, index.sink, tail)
        return retrieval(per_head(steady, heads), tokens, blocks, scan[:, None].expand(-1, heads))

    def _within_budget(self, index: KeyClusters, ranked: Tensor) -> Blocks:
        """Clusters in rank order [T, H, C] while the budget lasts; the last gives what is left of it."""
        sizes = torch.gather(index.sizes.expand(len(ranked), -1, -1), 2, ranked.clamp_min(0))
        sizes = torch.where(ranked >= 0, sizes, 0)
        left = self.token_budget - (sizes.cumsum(-1) - sizes)
        tokens = torch.minimum(sizes, left.clamp_min(0))
        width = int((tokens > 0).sum(-1).max()) if tokens.numel() else 0
        ranked, sizes, tokens = ranked[..., :width], sizes[..., :width], tokens[..., :width]
        pages = torch.where(tokens > 0, (sizes + PAGE_TOKENS - 1) // PAGE_TOKENS, 0)
        touched = ((tokens + PAGE_TOKENS - 1) // PAGE_TOKENS).sum(-1)
        return Blocks(torch.where(tokens > 0, ranked, -1), pages, tokens, touched)

    def index_bytes(self, index: KeyClusters, layer: LayerInfo) -> int:
        return index.centroids.numel() * layer.item_bytes + index.sizes.numel() * 4

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"token_budget": max(n, 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "token_budget": trial.suggest_int("token_budget", 32, max(context_length, 64), log=True),
            "nlist": trial.suggest_categorical("nlist", [100, 200, 400, 800]),
            "sink": trial.suggest_categorical("sink", [0, 4, 16]),
        }
