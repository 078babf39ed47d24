"""RetroInfer's own arithmetic: from a context length and budgets to cluster, cache and buffer counts.

Source: microsoft/RetrievalAttention, ``config/config.py`` and ``cache_hub/retroinfer_cache.py`` (v1,
February 2026 on) and ``benchmark/config.py`` (v0). Everything is an integer count of clusters, pages of 8
tokens or tokens; ``round`` is Python's (ties to even), as in the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtune.errors import InputError
from kvtune.geometry import PAGE_TOKENS

RETRIEVAL = 0.018
ESTIMATION = 0.232
V0_ESTIMATION = 0.25
SINK = 4
LOCAL = 64
TOKENS_PER_CENTROID = 16
SEGMENT_TOKENS = 8192
BUFFER_CLUSTERS = 32
UPDATE_TOKENS = 1024
"""Decode-made tokens that become one more segment of the index."""

SHORT_CONTEXT = 4096
SHORT_BUFFER_CLUSTERS = 150


@dataclass(frozen=True)
class Growth:
    """One decode-made segment of 1,024 tokens: its clusters and its share of the two zones."""

    centroids: int
    nprobe: int
    es: int


@dataclass(frozen=True)
class V1Counts:
    """What RetroInfer v1 derives for one context.

    ``n_centroids`` clusters in ``n_segment`` segments; ``nprobe`` of them are retrieved and ``es`` more are
    estimated; the cache holds ``cache_pages``, the execution buffer ``buffer_pages``. ``segments_new``
    decode-made segments of ``growth`` are already counted in the last two (the zones grow as they come).
    """

    n_segment: int
    n_centroids: int
    pages_per_cluster: int
    nprobe: int
    es: int
    cache_clusters: int
    cache_pages: int
    buffer_clusters: int
    buffer_pages: int
    growth: Growth
    segments_new: int

    @property
    def max_compute(self) -> int:
        """Clusters ranked for retrieval or estimation."""
        return self.nprobe + self.es


@dataclass(frozen=True)
class V0Counts:
    """What RetroInfer v0 derives for one context (fields as in its JSON)."""

    n_segment: int
    n_centroids: int
    nprobe: int
    cache_cluster_num: int
    max_compute_cluster_num: int


def growth_counts(
    retrieval: float = RETRIEVAL,
    estimation: float = ESTIMATION,
    tokens_per_centroid: int = TOKENS_PER_CENTROID,
) -> Growth:
    """Clusters of one decode-made segment; the defaults give 64, of which 1 is retrieved, 15 estimated."""
    tokens = pages_per_cluster(tokens_per_centroid) * PAGE_TOKENS
    centroids = max(round(UPDATE_TOKENS / tokens) // 8 * 8, 8)
    return Growth(centroids, max(round(centroids * retrieval), 1), max(round(centroids * estimation), 1))


def v1_counts(
    context: int,
    retrieval: float = RETRIEVAL,
    estimation: float = ESTIMATION,
    cache_ratio: float = 0.0,
    buffer_cluster_num: int = BUFFER_CLUSTERS,
    *,
    tokens_per_centroid: int = TOKENS_PER_CENTROID,
    segment_tokens: int = SEGMENT_TOKENS,
    new_tokens: int = 0,
    steady: int = SINK + LOCAL,
) -> V1Counts:
    """Counts of RetroInfer v1 for a prompt of ``context`` tokens.

    ``retrieval`` and ``estimation`` are fractions of the clusters, ``cache_ratio`` the share of the clusters
    that the cache holds (0: three times ``nprobe``). ``new_tokens`` are the decode steps to come (the token
    that prefill yields is not one): beyond 1,024 the index grows, and cache and buffer count that growth
    ahead. A prompt with fewer than 1,024 tokens outside the ``steady`` ones has no clusters yet. The engine
    itself fixes ``tokens_per_centroid`` to 16 and ``segment_tokens`` to 8,192.

    Raises ``InputError`` on a count below 1 or a fraction outside [0, 1].
    """
    _check_counts(context=context, tokens_per_centroid=tokens_per_centroid, segment_tokens=segment_tokens)
    _check_fractions(retrieval=retrieval, estimation=estimation, cache_ratio=cache_ratio)
    n_segment = max(round(context / segment_tokens), 1)
    pages = pages_per_cluster(tokens_per_centroid)
    growth = growth_counts(retrieval, estimation, tokens_per_centroid)
    if indexed_at_prefill(context, steady):
        factor = math.lcm(8, n_segment)
        n_centroids = nearest_multiple(max(round(context / tokens_per_centroid), factor), factor)
        growing = new_tokens
    else:
        n_centroids = 0
        growing = context - steady + new_tokens
    segments_new = (growing - 1) // UPDATE_TOKENS if growing > UPDATE_TOKENS else 0
    nprobe = min(max(round(n_centroids * retrieval), 1), n_centroids)
    es = min(round(n_centroids * estimation), n_centroids - nprobe)
    all_centroids = n_centroids + segments_new * growth.centroids
    all_nprobe = nprobe + segments_new * growth.nprobe
    cache_clusters = round(all_centroids * cache_ratio) if cache_ratio > 0 else 3 * all_nprobe
    wanted_buffer = SHORT_BUFFER_CLUSTERS if context <= SHORT_CONTEXT else buffer_cluster_num
    buffer_clusters = max(wanted_buffer, 4 * all_nprobe)
    return V1Counts(
        n_segment=n_segment,
        n_centroids=n_centroids,
        pages_per_cluster=pages,
        nprobe=nprobe,
        es=es,
        cache_clusters=cache_clusters,
        cache_pages=cache_clusters * pages,
        buffer_clusters=buffer_clusters,
        buffer_pages=buffer_clusters * pages,
        growth=growth,
        segments_new=segments_new,
    )


def v0_counts(
    context: int,
    retrieval: float = RETRIEVAL,
    estimation: float = V0_ESTIMATION,
    *,
    tokens_per_centroid: int = TOKENS_PER_CENTROID,
    segment_tokens: int = SEGMENT_TOKENS,
) -> V0Counts:
    """Counts of RetroInfer v0 (``int`` truncates, ``estimation`` does not count the retrieved clusters).

    A context too short for one multiple of ``32 · n_segment`` clusters gets one multiple: the engine would
    compute zero clusters and fail. Raises ``InputError`` as :func:`v1_counts`.
    """
    _check_counts(context=context, tokens_per_centroid=tokens_per_centroid, segment_tokens=segment_tokens)
    _check_fractions(retrieval=retrieval, estimation=estimation)
    n_segment = max(1, context // segment_tokens)
    factor = 32 * n_segment
    n_centroids = max(nearest_multiple(math.ceil(context / tokens_per_centroid), factor), factor)
    nprobe = max(1, int(n_centroids * retrieval))
    return V0Counts(n_segment, n_centroids, nprobe, 3 * nprobe, int(n_centroids * estimation) + nprobe)


def pages_per_cluster(tokens_per_centroid: int) -> int:
    """Pages of 8 tokens that an average cluster is given, at least one."""
    return max(round(tokens_per_centroid / PAGE_TOKENS), 1)


def v0_pages_per_cluster(context: int, n_centroids: int, steady: int = SINK + LOCAL) -> int:
    """Pages that v0 gives a cluster: the average size, rounded down to tokens and up to pages."""
    return max(math.ceil((context - steady) // n_centroids / PAGE_TOKENS), 1)


def indexed_at_prefill(context: int, steady: int = SINK + LOCAL) -> bool:
    """Whether the prompt gets an index: at least 1,024 tokens outside the steady zone."""
    return context >= steady + UPDATE_TOKENS


def nearest_multiple(value: int, factor: int) -> int:
    """Multiple of ``factor`` nearest to ``value``; the lower one on a tie."""
    lower = value // factor * factor
    return lower if value - lower <= lower + factor - value else lower + factor


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"RetroInfer: {name} must be at least 1, not {count}")


def _check_fractions(**fractions: float) -> None:
    for name, fraction in fractions.items():
        if not 0 <= fraction <= 1:
            raise InputError(f"RetroInfer: {name} must lie in [0, 1], not {fraction}")
