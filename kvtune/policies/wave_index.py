"""RetroInfer's wave index: segmented spherical k-means over keys, clusters retrieved or estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.clustering import cluster_sums, members, segmented_kmeans
from kvtune.geometry import PAGE_TOKENS, LayerInfo, ModelGeometry
from kvtune.policies import retroinfer
from kvtune.policies.base import Clusters, Policy, Selection, check
from kvtune.policies.layout import cluster_tokens, per_head, steady_zone


@dataclass
class WaveIndexState:
    """Clusters of one layer, in order of creation: those of the prompt, then 1,024 tokens at a time.

    clusters: centroids [H, C, d] and value sums [H, C, dv] at the model's precision, sizes [H, C]
    order [H, M]: token positions sorted by cluster; offsets [H, C + 1] into it
    context: tokens of the prompt; sink: how many of them are sinks; prompt_end: where its clusters end
    tail_keys [H, n, d], tail_values [H, n, dv]: the dense tail, from position ``tail_start`` on
    """

    layer: LayerInfo
    context: int
    clusters: Clusters
    order: Tensor
    offsets: Tensor
    sink: int
    prompt_end: int
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


@dataclass(frozen=True)
class WaveIndex(Policy):
    """Cluster the prompt's keys; retrieve the best clusters exactly, estimate the next by their centroid.

    ``retrieval`` (0.018) and ``estimation`` (0.232) are fractions of the clusters; ``tokens_per_centroid``
    (16) and ``segment`` (8192 tokens, clustered independently) shape the index; ``sink`` (4) and ``local``
    (64) tokens stay exact, as do decode-made tokens until 1,024 have gathered and join as one segment.
    ``buffer_clusters`` (32; 150 up to 4K tokens) bounds the execution buffer: clusters past it are dropped,
    not estimated. ``estimate='all'`` estimates every cluster not retrieved (the paper's text),
    ``'budget'`` only the next ``estimation`` share (its code).

    Clusters are ranked by the sum over the GQA group of softmax(q·c). Below 1,024 tokens outside the
    steady zone, attention is full.
    """

    retrieval: float = retroinfer.RETRIEVAL
    estimation: float = retroinfer.ESTIMATION
    tokens_per_centroid: int = retroinfer.TOKENS_PER_CENTROID
    segment: int = retroinfer.SEGMENT_TOKENS
    sink: int = retroinfer.SINK
    local: int = retroinfer.LOCAL
    buffer_clusters: int = retroinfer.BUFFER_CLUSTERS
    estimate: str = "budget"

    name: ClassVar[str] = "wave_index"
    title: ClassVar[str] = "RetroInfer wave index"
    source: ClassVar[str] = "Chen et al., arXiv 2505.02922; microsoft/RetrievalAttention"
    budget: ClassVar[str | None] = "retrieval"

    def __post_init__(self) -> None:
        for name in ("retrieval", "estimation"):
            value = getattr(self, name)
            check(0 <= value <= 1, self, f"{name} must lie in [0, 1], not {value}")
        check(self.retrieval > 0, self, "retrieval must be above 0")
        check(self.tokens_per_centroid >= 2, self, "tokens_per_centroid must be 2 or more")
        check(self.segment >= 256, self, f"segment must be 256 tokens or more, not {self.segment}")
        check(self.sink >= 0, self, f"sink must be 0 or more, not {self.sink}")
        check(self.local >= 1, self, f"local must be 1 or more, not {self.local}")
        check(self.buffer_clusters >= 1, self, "buffer_clusters must be 1 or more")
        check(
            self.estimate in ("budget", "all"), self, f"estimate is 'budget' or 'all', not '{self.estimate}'"
        )

    def build_key(self) -> tuple[Any, ...]:
        return (self.tokens_per_centroid, self.segment, self.sink, self.local)

    def counts(self, context: int) -> retroinfer.V1Counts:
        """Clusters, zones and buffer for a prompt of ``context`` tokens."""
        return retroinfer.v1_counts(
            context,
            self.retrieval,
            self.estimation,
            buffer_cluster_num=self.buffer_clusters,
            tokens_per_centroid=self.tokens_per_centroid,
            segment_tokens=self.segment,
            steady=self.sink + self.local,
        )

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> WaveIndexState:
        heads, n, dim = keys.shape
        counts = self.counts(n)
        sink = min(self.sink, n)
        end = n - self.local if counts.n_centroids else sink
        index = WaveIndexState(
            layer=layer,
            context=n,
            clusters=Clusters(
                keys.new_zeros(heads, 0, dim),
                torch.zeros(heads, 0, dtype=torch.int64, device=keys.device),
                values.new_zeros(heads, 0, values.shape[2]),
            ),
            order=torch.zeros(heads, 0, dtype=torch.int64, device=keys.device),
            offsets=torch.zeros(heads, 1, dtype=torch.int64, device=keys.device),
            sink=sink,
            prompt_end=end,
            tail_start=end,
            tail_keys=keys[:, end:],
            tail_values=values[:, end:],
        )
        if counts.n_centroids:
            prompt = keys[:, sink:end], values[:, sink:end]
            self._add(index, *prompt, sink, counts.n_centroids, counts.n_segment)
        return index

    def append(self, index: WaveIndexState, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        index.tail_keys = torch.cat([index.tail_keys, keys], 1)
        index.tail_values = torch.cat([index.tail_values, values], 1)
        step = retroinfer.UPDATE_TOKENS
        growth = self.counts(index.context).growth
        while index.tail_keys.shape[1] >= step + self.local:
            new = index.tail_keys[:, :step], index.tail_values[:, :step]
            self._add(index, *new, index.tail_start, growth.centroids, 1)
            index.tail_start += step
            index.tail_keys, index.tail_values = index.tail_keys[:, step:], index.tail_values[:, step:]

    def _add(
        self,
        index: WaveIndexState,
        keys: Tensor,
        values: Tensor,
        start: int,
        n_centroids: int,
        n_segments: int,
    ) -> None:
        """Cluster tokens ``start`` … and append the clusters to ``index``."""
        clustering = segmented_kmeans(keys, n_centroids, n_segments)
        order, offsets = members(clustering.assignment, clustering.sizes)
        sums = cluster_sums(values, clustering.assignment, n_centroids)
        old = index.clusters
        index.clusters = Clusters(
            torch.cat([old.centroids, clustering.centroids.to(keys.dtype)], 1),
            torch.cat([old.sizes, clustering.sizes], 1),
            torch.cat([old.value_sums, sums.to(values.dtype)], 1),
        )
        index.offsets = torch.cat([index.offsets, offsets[:, 1:] + index.order.shape[1]], 1)
        index.order = torch.cat([index.order, order + start], 1)

    def select(self, index: WaveIndexState, queries: Tensor, positions: Tensor) -> Selection:
        heads = queries.shape[1]
        counts = self.counts(index.context)
        grown = self._grown(index, positions)
        tail = index.prompt_end + grown * retroinfer.UPDATE_TOKENS
        steady = per_head(steady_zone(positions, index.sink, tail, index.layer.window), heads)
        visible = counts.n_centroids + grown * counts.growth.centroids
        scan = per_head(visible[:, None] * index.layer.head_dim * index.layer.item_bytes, heads)[..., 0]
        if index.clusters.sizes.shape[1] == 0 or int(visible.max()) == 0:
            return Selection(steady, scan)
        nprobe = counts.nprobe + grown * counts.growth.nprobe
        ranked = self._rank(index, queries, visible)
        column = torch.arange(ranked.shape[2], device=ranked.device)
        probed = torch.where(column < nprobe[:, None, None], ranked, -1)[..., : int(nprobe.max())]
        kept, pages, tokens, truncated = self._fill_buffer(index, counts, probed, nprobe)
        retrieved = cluster_tokens(kept, index.order, index.offsets)
        return Selection(
            positions=torch.cat([steady, retrieved], -1),
            scan_bytes=scan,
            resident=steady.shape[2],
            estimated=self._estimated(ranked, nprobe, counts.es + grown * counts.growth.es),
            clusters=index.clusters,
            blocks=kept,
            block_pages=pages,
            block_tokens=tokens,
            truncated=truncated,
        )

    def _grown(self, index: WaveIndexState, positions: Tensor) -> Tensor:
        """Segments that had joined before the token at each position was appended, [T]."""
        full = (positions - self.local - index.prompt_end) // retroinfer.UPDATE_TOKENS
        return full.clamp(0, index.grown)

    def _rank(self, index: WaveIndexState, queries: Tensor, visible: Tensor) -> Tensor:
        """Visible, non-empty clusters from best to worst, [T, H, C], padded with -1."""
        steps, heads, group, dim = queries.shape
        flat = queries.float().permute(1, 0, 2, 3).reshape(heads, steps * group, dim)
        dots = torch.matmul(flat, index.clusters.centroids.float().transpose(1, 2))
        logits = dots.view(heads, steps, group, -1).permute(1, 0, 2, 3) * index.layer.scaling
        column = torch.arange(logits.shape[-1], device=queries.device)
        hidden = column >= visible[:, None]
        logits = logits.masked_fill(hidden[:, None, None, :], -math.inf)
        share = torch.softmax(logits, -1).sum(2)
        unusable = hidden[:, None, :] | (index.clusters.sizes == 0)
        share = share.masked_fill(unusable, -math.inf)
        best, ranked = torch.sort(share, dim=-1, descending=True, stable=True)
        return torch.where(torch.isinf(best) | torch.isnan(best), -1, ranked)

    def _fill_buffer(
        self, index: WaveIndexState, counts: retroinfer.V1Counts, probed: Tensor, nprobe: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keep clusters in rank order while their pages fit the execution buffer; drop the rest."""
        sizes = torch.gather(index.clusters.sizes.expand(len(probed), -1, -1), 2, probed.clamp_min(0))
        sizes = torch.where(probed >= 0, sizes, 0)
        pages = (sizes + PAGE_TOKENS - 1) // PAGE_TOKENS
        room = torch.maximum(torch.full_like(nprobe, counts.buffer_clusters), 4 * nprobe)
        fits = pages.cumsum(-1) <= (room * counts.pages_per_cluster)[:, None, None]
        kept = torch.where(fits & (probed >= 0), probed, -1)
        truncated = ((probed >= 0) & ~fits).sum(-1)
        return kept, torch.where(fits, pages, 0), torch.where(fits, sizes, 0), truncated

    def _estimated(self, ranked: Tensor, nprobe: Tensor, share: Tensor) -> Tensor | None:
        """The clusters after the first ``nprobe``: all of them, or the next ``share``."""
        last = nprobe + share if self.estimate == "budget" else torch.full_like(nprobe, ranked.shape[2])
        if int((last - nprobe).max()) <= 0:
            return None
        column = torch.arange(ranked.shape[2], device=ranked.device)
        inside = (column >= nprobe[:, None, None]) & (column < last[:, None, None])
        return torch.where(inside, ranked, -1)[..., int(nprobe.min()) : int(last.max())]

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"retrieval": 1.0, "estimation": 0.0}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "retrieval": trial.suggest_float("retrieval", 0.002, 0.2, log=True),
            "estimation": trial.suggest_float("estimation", 0.0, 0.8),
            "tokens_per_centroid": trial.suggest_categorical("tokens_per_centroid", [4, 8, 12, 16, 24, 32]),
            "segment": trial.suggest_categorical("segment", [1024, 2048, 4096, 8192, 16384]),
            "sink": trial.suggest_categorical("sink", [0, 4, 16]),
            "local": trial.suggest_categorical("local", [16, 32, 64, 128]),
        }
