"""RetrievalAttention: tokens found by nearest-neighbour search over the keys, in a graph or in lists."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.clustering.faiss_index import FaissIndex
from kvtune.clustering.key_index import IndexSpec
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.keys import KeyStore
from kvtune.policies.layout import best_blocks, per_head, position_blocks, retrieval, steady_zone

_SIZES = ("top_k", "recent", "update_interval", "ef_construction")


@dataclass
class Part:
    """The tokens start … stop-1: one Faiss index per kv head, whose ids count from ``start``."""

    start: int
    stop: int
    heads: list[FaissIndex]


@dataclass
class NeighbourIndex:
    """Parts in order of position; ``first`` is where the prompt's part ends (or would)."""

    layer: LayerInfo
    store: KeyStore
    first: int
    parts: list[Part]

    @property
    def stop(self) -> int:
        """The first token that no part holds."""
        return self.parts[-1].stop if self.parts else self.first


@dataclass(frozen=True)
class RetrievalAttention(Policy):
    """The first ``sink`` (128) and last ``recent`` (512) tokens, and ``top_k`` (4096) found by search.

    A Faiss index per kv head over the keys between, by inner product (keys are not normalised):
    ``index`` is ``ivf`` (default) or ``hnsw``. Each query head of a group searches for its own ``top_k``;
    the answers are united and the ``top_k`` of best q·k kept. Where all indexed tokens fit, nothing is
    searched. ``nlist`` (0: √N) lists, of which ``nprobe`` (0: as many as hold twice ``top_k`` on average)
    are read; ``m`` (32) links per node, ``ef_construction`` (40) and ``ef_search`` (0: ``top_k``, below
    which Faiss never goes) for the graph.

    ``scan_bytes`` adds up the group's searches, which share nothing: IVF reads every list's centroid and
    the probed lists (vectors and 4-byte ids); HNSW every key it compares and the 2·m links of every node
    it expands. Built by one thread, so that builds repeat; searched by Faiss on the CPU, or for IVF on the
    keys' GPU where Faiss is built for it.

    Differences: the paper builds a graph that knows prompt queries (RoarGraph); Faiss's graph is of keys
    alone, and finds less for queries that are unlike keys. The paper does not update its index;
    here later tokens stay resident until ``update_interval`` (1024) have left the recent window, and then
    form an index of their own (of no more lists than tokens). ALiBi is left out of the score. A layer with
    a window of its own is refused, as are NaN and infinite keys.
    """

    top_k: int = 4096
    index: str = "ivf"
    sink: int = 128
    recent: int = 512
    update_interval: int = 1024
    nlist: int = 0
    nprobe: int = 0
    m: int = 32
    ef_construction: int = 40
    ef_search: int = 0

    name: ClassVar[str] = "retrieval_attention"
    title: ClassVar[str] = "RetrievalAttention"
    source: ClassVar[str] = "Liu et al., arXiv 2409.10516; Faiss IVF and HNSW"
    budget: ClassVar[str | None] = "top_k"

    def __post_init__(self) -> None:
        check(self.index in ("ivf", "hnsw"), self, f"index is 'ivf' or 'hnsw', not '{self.index}'")
        for name in _SIZES:
            check(getattr(self, name) >= 1, self, f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("sink", "nlist", "nprobe", "ef_search"):
            check(getattr(self, name) >= 0, self, f"{name} must be 0 or more, not {getattr(self, name)}")
        check(2 <= self.m <= 512, self, f"m must lie in 2…512, not {self.m}")

    def build_key(self) -> tuple[Any, ...]:
        shape = (self.nlist,) if self.index == "ivf" else (self.m, self.ef_construction)
        return (self.index, self.sink, self.recent, self.update_interval, *shape)

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> NeighbourIndex:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        first = max(keys.shape[1] - self.recent, self.sink)
        index = NeighbourIndex(layer, KeyStore(keys, values, layer), first, [])
        if first > self.sink:
            self._add(index, self.sink, first)
        return index

    def append(self, index: NeighbourIndex, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        index.store.append(keys, values)
        while index.store.length - self.recent >= index.stop + self.update_interval:
            self._add(index, index.stop, index.stop + self.update_interval)

    def _add(self, index: NeighbourIndex, start: int, stop: int) -> None:
        keys = index.store.keys[:, start:stop]
        if self.index == "ivf":
            spec = IndexSpec.of("ivf", {"nlist": min(self.nlist, stop - start)})
        else:
            spec = IndexSpec.of("hnsw", {"M": self.m, "efConstruction": self.ef_construction})
        size = index.layer.item_bytes
        heads = [FaissIndex.build(rows, spec, keys.device, item_bytes=size) for rows in keys]
        index.parts.append(Part(start, stop, heads))

    def select(self, index: NeighbourIndex, queries: Tensor, positions: Tensor) -> Selection:
        steps, heads = queries.shape[:2]
        grown = (positions + 1 - self.recent - index.first).clamp_min(0) // self.update_interval
        tail = index.first + grown * self.update_interval
        searched = tail - self.sink > self.top_k
        best = queries.new_full((steps, heads, index.stop), -math.inf, dtype=torch.float32)
        scan = positions.new_zeros(steps, heads)
        for part in index.parts:
            asking = torch.nonzero(searched & (part.stop <= tail))[:, 0]
            for head, neighbours in enumerate(part.heads):
                self._search(part, neighbours, queries[asking, head], best, scan, (asking, head))
        token = torch.arange(index.stop, device=queries.device)
        free = ~searched[:, None] & (token >= self.sink) & (token < tail[:, None])
        best = torch.where(free[:, None], 0.0, best)
        tokens = best_blocks(best, best > -math.inf, self.top_k)
        steady = per_head(steady_zone(positions, self.sink, tail), heads)
        return retrieval(steady, tokens, position_blocks(tokens, index.stop), scan)

    def _search(
        self,
        part: Part,
        neighbours: FaissIndex,
        queries: Tensor,
        best: Tensor,
        scan: Tensor,
        at: tuple[Tensor, int],
    ) -> None:
        """Put what queries [t, G, d] find, each token's best score, into best [T, H, N] at (steps, head)."""
        steps, group, dim = queries.shape
        if not steps:
            return
        k = min(self.top_k, part.stop - part.start)
        found = neighbours.search(queries.reshape(-1, dim), k, self._effort(neighbours, part))
        ids = torch.from_numpy(found.ids).to(best.device).view(steps, group * k)
        scores = torch.from_numpy(found.scores).to(best.device).view(steps, group * k)
        rows = best.new_full((steps, part.stop - part.start), -math.inf)
        rows.scatter_reduce_(1, ids.clamp_min(0), scores, "amax")
        best[at[0], at[1], part.start : part.stop] = rows
        scanned = torch.from_numpy(found.scan_bytes).to(scan.device).view(steps, group)
        scan[at[0], at[1]] += scanned.sum(1)

    def _effort(self, neighbours: FaissIndex, part: Part) -> dict[str, int]:
        if self.index == "hnsw":
            return {"efSearch": self.ef_search or self.top_k}
        lists = neighbours.spec.parameters["nlist"]
        enough = -(-2 * self.top_k * lists // (part.stop - part.start))
        return {"nprobe": min(self.nprobe or enough, lists)}

    def index_bytes(self, index: NeighbourIndex, layer: LayerInfo) -> int:
        return sum(neighbours.structure_bytes() for part in index.parts for neighbours in part.heads)

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"top_k": max(n, 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "top_k": trial.suggest_int("top_k", 32, max(context_length, 64), log=True),
            "sink": trial.suggest_categorical("sink", [4, 16, 64, 128]),
            "recent": trial.suggest_categorical("recent", [64, 128, 256, 512]),
        }
