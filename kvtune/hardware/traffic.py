"""What a decode step moves in each layer, in bytes: the input of the cost model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvtune.geometry import PAGE_TOKENS, LayerInfo, ModelGeometry
from kvtune.policies.retroinfer import UPDATE_TOKENS
from kvtune.policies.wave_index import WaveIndex

HALF_PAGE = (PAGE_TOKENS - 1) / (2 * PAGE_TOKENS)
"""Pages of a cluster beyond its tokens ÷ 8, where every remainder is as likely: (0 + … + 7) / 8 tokens."""


@dataclass(frozen=True)
class LayerTraffic:
    """One layer, one sequence, one decode step, all kv heads together; means may be fractions.

    scan_bytes        index read to decide
    estimation_bytes  value sums and sizes of the estimated clusters
    exact_bytes       pages of exact keys and values, resident and retrieved
    missed_bytes      those of the retrieved pages that the cache lacks
    blocks            blocks looked up in the cache
    dense             full attention: ``exact_bytes`` are read in one piece, and nothing is decided
    attended_bytes    of ``exact_bytes``, those of tokens: the last page of a block is seldom full (``None``:
                      all of them)
    fetched_bytes     of ``missed_bytes``, those of tokens (``None``: all of them)
    """

    scan_bytes: float = 0.0
    estimation_bytes: float = 0.0
    exact_bytes: float = 0.0
    missed_bytes: float = 0.0
    blocks: float = 0.0
    dense: bool = False
    attended_bytes: float | None = None
    fetched_bytes: float | None = None

    @property
    def attended(self) -> float:
        """Bytes of the exact tokens: what the attention reads of the pages."""
        return self.exact_bytes if self.attended_bytes is None else self.attended_bytes

    @property
    def fetched(self) -> float:
        """Bytes of the missed tokens: what crosses the bus."""
        return self.missed_bytes if self.fetched_bytes is None else self.fetched_bytes


Traffic = tuple[LayerTraffic, ...]
"""One entry for each layer of the model."""


def full_traffic(geometry: ModelGeometry, tokens: float) -> Traffic:
    """Full attention at ``tokens`` visible tokens: all keys and values inside each layer's window."""
    return tuple(dense_traffic(geometry.layer(layer), tokens) for layer in range(geometry.n_layers))


def dense_traffic(layer: LayerInfo, tokens: float) -> LayerTraffic:
    """One layer with full attention."""
    seen = tokens if layer.window is None else min(tokens, layer.window)
    return LayerTraffic(exact_bytes=seen * layer.token_bytes * layer.n_kv_heads, dense=True)


def wave_traffic(
    geometry: ModelGeometry,
    context: int,
    policy: WaveIndex | None = None,
    *,
    hit_ratio: float = 0.0,
    step: int = 0,
    cluster_pages: float | None = None,
    dense_layers: Collection[int] = (),
) -> Traffic:
    """The wave index without a trace, by RetroInfer's own counts (``policies.retroinfer.v1_counts``).

    ``context`` tokens of prompt, ``step`` decode steps done before this one, ``hit_ratio`` of pages in the
    cache. A retrieved cluster has ``cluster_pages`` pages: by default its mean tokens ÷ 8, and 7/16 for the
    page that is not full (RetroInfer's engine would drop what exceeds the execution buffer, and so does
    this). Windowed and ``dense_layers`` are dense, as all are while there is no cluster. Pinned spans and
    refresh steps are not counted.
    """
    policy = WaveIndex() if policy is None else policy
    return tuple(
        dense_traffic(layer, context + step + 1)
        if layer.window is not None or layer.layer in dense_layers
        else _wave_layer(layer, context, policy, hit_ratio, step, cluster_pages)
        for layer in map(geometry.layer, range(geometry.n_layers))
    )


def _wave_layer(
    layer: LayerInfo,
    context: int,
    policy: WaveIndex,
    hit_ratio: float,
    step: int,
    cluster_pages: float | None,
) -> LayerTraffic:
    counts = policy.counts(context)
    if not counts.n_centroids:
        return dense_traffic(layer, context + step + 1)
    grown, tail = divmod(step, UPDATE_TOKENS)
    clusters = counts.n_centroids + grown * counts.growth.centroids
    retrieved = counts.nprobe + grown * counts.growth.nprobe
    wanted = clusters - retrieved if policy.estimate == "all" else counts.es + grown * counts.growth.es
    estimated = min(wanted, clusters - retrieved)
    indexed = context - policy.sink - policy.local + grown * UPDATE_TOKENS
    each = indexed / clusters / PAGE_TOKENS + HALF_PAGE if cluster_pages is None else cluster_pages
    room = max(counts.buffer_clusters, 4 * retrieved) * counts.pages_per_cluster
    pages = min(retrieved * each, float(room))
    tokens = pages * max(PAGE_TOKENS * (1 - HALF_PAGE / each), 1.0)
    resident = policy.sink + policy.local + tail + 1
    heads, page = layer.n_kv_heads, layer.page_bytes
    return LayerTraffic(
        scan_bytes=float(heads * clusters * layer.head_dim * layer.item_bytes),
        estimation_bytes=float(
            heads * estimated * (layer.value_dim * layer.item_bytes + policy.number_bytes)
        ),
        exact_bytes=heads * (-(-resident // PAGE_TOKENS) + pages) * page,
        missed_bytes=heads * pages * (1 - hit_ratio) * page,
        blocks=float(heads * retrieved),
        attended_bytes=heads * (resident + tokens) * layer.token_bytes,
        fetched_bytes=heads * tokens * (1 - hit_ratio) * layer.token_bytes,
    )
