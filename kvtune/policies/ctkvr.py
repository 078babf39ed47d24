"""CTkvr: the prompt's last queries as centroids, each with a list of its best keys, rescored exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.ctkvr_centroids import kmeans_centroids, retrieved_mass
from kvtune.policies.ctkvr_dynamic import Stretch, next_centroids
from kvtune.policies.ctkvr_lists import InvertedLists, invert, nearest, union
from kvtune.policies.ctkvr_offline import load_centroids
from kvtune.policies.ctkvr_rescoring import INT8_SCALE_BYTES, rescore
from kvtune.policies.ctkvr_simhash import signatures, thin
from kvtune.policies.keys import KeyStore
from kvtune.policies.layout import per_head, position_blocks, retrieval, span, steady_zone

KINDS = ("last", "kmeans", "attention_weighted", "offline")
_ENTRY_BYTES = 4


@dataclass
class CTkvrIndex:
    """The keys so far, and the inverted lists by stretch of decode steps (one stretch unless ``dynamic``)."""

    store: KeyStore
    stretches: list[Stretch]


@dataclass(frozen=True)
class CTkvr(Policy):
    """Retrieve the ``top_k`` (512) best tokens of the lists of the ``nprobe`` (4) nearest query centroids.

    The last ``n_centroids`` (C, 1024) prompt queries are the centroids: neighbouring queries are alike after
    RoPE and share most of their top keys. Each is scored against all prompt keys, and its ``rho`` (512) best
    keys per kv head form its list. A step finds the centroids of largest cosine, scores the union of their
    lists exactly and keeps the best. ``sink`` (4) and ``local`` (64) tokens and all decode-made tokens are
    resident. Where every other token fits ``top_k``, nothing is scored. A step reads every centroid, the
    entries of the probed lists (4 bytes each) and the candidates' keys.

    Differences: lists are per kv head, as in the paper; how its query heads share one is not said there in
    what was at hand. Here the group's queries at one prompt position are one centroid: similarity is the sum
    of their cosines, and a key ranks by the sum of its probabilities (in a list: among all keys; of a step:
    among the candidates). ``rho``, ``nprobe``, ``top_k``, ``sink`` and ``local`` are kvtune's defaults, the
    paper's were not at hand either. A list is not causal, and ALiBi enters only the rescoring. Where no
    prompt query was recorded, attention stays full; a layer with a window of its own is refused.

    Options, off by default. The ideas are a secondary article's, as are the figures in brackets. Measured
    means: output error (recall@100) against the plain method's 0.059 (0.915), by
    ``benchmarks/ctkvr_options.py``: layers 3, 9, 15, 21 and 27 of SmolLM2-135M in float32, code search,
    4K tokens, 2 samples, ``top_k`` 128, ``rho`` 256. One small model, where 256 centroids nearly do what 1024
    do (0.061, 0.909) for half of the bytes read.

    - ``centroids``: ``last``; ``kmeans`` over the last ``query_window`` (1024) queries;
      ``attention_weighted``, the same with each query weighed by its probability outside the steady zone;
      ``offline``, learned from other traces by ``ctkvr_offline.learn_centroids`` and read from the .npz file
      ``offline``. k-means thins only where ``n_centroids`` is below the queries that there are. Measured, 256
      centroids each: 0.061, 0.060, 0.061 (0.909…0.910), none better than the last 256 queries.
    - ``dynamic`` (1000): after that many decode steps, lists used > 2x the mean split, lists used < 0.5x
      merge (recall 78% to 93%), as many of one as of the other; then all lists are made anew and hold the
      decode-made keys too, which until then are resident. Measured every 32 steps: 0.062 (0.909) for 0.97x
      the bytes; not measured yet on answers of thousands of tokens.
    - ``simhash`` (0.93): tokens whose 64-bit SimHash agrees in that share of bits with a better one of the
      list leave it (35% fewer scores). Measured: 0.278 (0.807), and hardly a score less. Layers 15, 21 and 27
      keep their error; layers 3 and 9 lose a tenth of the entries and most of the attention (0.60): it lies
      on tokens that repeat each other, and each of them counts.
    - ``cold_start`` (200): that many full decode steps, then as many on which the best tokens of all keys are
      kept, fewer and fewer down to ``top_k``. Measured with 32: 0.025 (0.970) for 1.5x the bytes.
    - ``position_weights`` ("0.5:1.5"): the factor on a token's probability, from the first position to the
      last. Measured: 0.059 (0.912).
    - ``average_length``: ``top_k`` becomes top_k·√(length / average_length). Measured at twice the average:
      0.050 (0.931) for 1.06x the bytes, as a larger ``top_k`` gives (256: 0.043, 0.934 for 1.13x).
    - ``int8``: candidates are scored from INT8 keys with a 2-byte scale; attention reads the true ones.
      Measured: 0.059 (0.915); the candidates' bytes fall to 26% of float32 (52% of 16-bit at d 64).
    """

    top_k: int = 512
    n_centroids: int = 1024
    rho: int = 512
    nprobe: int = 4
    sink: int = 4
    local: int = 64
    centroids: str = "last"
    query_window: int = 1024
    offline: str = ""
    dynamic: int = 0
    simhash: float = 0.0
    cold_start: int = 0
    position_weights: str = ""
    average_length: int = 0
    int8: bool = False

    name: ClassVar[str] = "ctkvr"
    title: ClassVar[str] = "CTkvr"
    source: ClassVar[str] = "Lu et al., arXiv 2512.15550"
    budget: ClassVar[str | None] = "top_k"

    def __post_init__(self) -> None:
        for name in ("top_k", "n_centroids", "rho", "nprobe", "local", "query_window"):
            check(getattr(self, name) >= 1, self, f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("sink", "dynamic", "cold_start", "average_length"):
            check(getattr(self, name) >= 0, self, f"{name} must be 0 or more, not {getattr(self, name)}")
        check(
            self.centroids in KINDS, self, f"centroids is one of {', '.join(KINDS)}, not '{self.centroids}'"
        )
        check((self.centroids == "offline") == bool(self.offline), self, "centroids=offline goes with a file")
        check(self.simhash == 0 or 0.5 < self.simhash <= 1, self, "simhash is 0 (off) or lies in (0.5, 1]")
        check(self._weights != (), self, "position_weights is two factors above 0, such as 0.5:1.5")

    @property
    def prompt_window(self) -> int:
        return {"last": self.n_centroids, "offline": 0}.get(self.centroids, self.query_window)

    @property
    def _weights(self) -> tuple[float, float] | tuple[()] | None:
        """The factors of ``position_weights``; ``()`` where they are none."""
        if not self.position_weights:
            return None
        try:
            first, last = (float(part) for part in self.position_weights.split(":"))
        except ValueError:
            return ()
        return (first, last) if 0 < first < math.inf and 0 < last < math.inf else ()

    def build_key(self) -> tuple[Any, ...]:
        if self.dynamic:
            return super().build_key()
        shape = (self.n_centroids, self.rho, self.sink, self.local, self.simhash)
        return (*shape, self.centroids, self.query_window, self.offline)

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> CTkvrIndex:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        centroids = self._centroids(keys, prompt_queries.transpose(1, 2), layer)
        return CTkvrIndex(KeyStore(keys, values, layer), [Stretch(self._lists(centroids, keys, layer))])

    def _centroids(self, keys: Tensor, queries: Tensor, layer: LayerInfo) -> Tensor:
        """Centroids [H, C, G, d] out of the prompt's queries [H, W, G, d], or from the file."""
        if self.centroids == "offline":
            found = load_centroids(self.offline, layer)[:, : self.n_centroids]
            wanted = f"{self.offline} has {len(found)} kv heads, layer {layer.layer} {len(keys)}"
            check(len(found) == len(keys), self, wanted)
            return found.to(keys.device)
        if self.centroids == "last":
            return queries[:, -self.n_centroids :]
        weights = None
        if self.centroids == "attention_weighted":
            weights = retrieved_mass(queries, keys, self.sink, self.local, layer)
        return kmeans_centroids(queries, self.n_centroids, weights)

    def _lists(self, centroids: Tensor, keys: Tensor, layer: LayerInfo) -> InvertedLists:
        tokens = invert(centroids, keys, self.sink, self.rho, layer)
        if self.simhash:
            tokens = thin(tokens, signatures(keys), self.simhash)
        return InvertedLists(centroids.to(keys.dtype), tokens)

    def append(self, index: CTkvrIndex, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        index.store.append(keys, values)

    def select(self, index: CTkvrIndex, queries: Tensor, positions: Tensor) -> Selection:
        heads, store = queries.shape[1], index.store
        number = torch.zeros_like(positions)
        if self.dynamic:
            number = (positions - store.prompt_length).clamp_min(0) // self.dynamic
        end = store.prompt_length + number * self.dynamic
        tail = torch.minimum(positions + 1 - self.local, end).clamp_min(self.sink)
        wanted, ramp = self._budget(index, positions, tail - self.sink)
        candidates, scan = self._candidates(index, queries, positions, number, tail, wanted, ramp)
        weights = self._weights or None
        rank = rescore(queries, positions, store.keys, candidates, store.layer, weights, self.int8)
        order = torch.argsort(rank, dim=-1, descending=True, stable=True)[..., : int(wanted.max())]
        kept = torch.arange(order.shape[2], device=order.device) < wanted[:, None, None]
        tokens = torch.where(kept, torch.gather(candidates, 2, order), -1)
        steady = per_head(steady_zone(positions, self.sink, tail), heads)
        return retrieval(steady, tokens, position_blocks(tokens, store.length), scan)

    def _budget(self, index: CTkvrIndex, positions: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens to keep of the ``room`` [T] retrievable ones, [T], and whether they come out of all keys."""
        wanted = torch.full_like(positions, self.top_k)
        if self.average_length:
            scale = torch.sqrt((positions + 1).double() / self.average_length)
            wanted = torch.round(self.top_k * scale).long().clamp_min(1)
        ramp = torch.zeros_like(positions, dtype=torch.bool)
        if self.cold_start:
            step = positions - index.store.prompt_length
            ramp = step < 2 * self.cold_start
            left = (2 * self.cold_start - step).clamp(0, self.cold_start) / self.cold_start
            wanted = wanted + torch.ceil((room - wanted).clamp_min(0) * left).long()
        if not index.stretches[0].lists.tokens.shape[1]:
            wanted = room
        return torch.minimum(wanted, room), ramp

    def _candidates(
        self,
        index: CTkvrIndex,
        queries: Tensor,
        positions: Tensor,
        number: Tensor,
        tail: Tensor,
        wanted: Tensor,
        ramp: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Tokens to score, [T, H, S] (-1 as padding), and the bytes read to choose among them, [T, H]."""
        steps, heads = queries.shape[:2]
        layer, room = index.store.layer, tail - self.sink
        key_bytes = layer.head_dim + INT8_SCALE_BYTES if self.int8 else layer.head_dim * layer.item_bytes
        free = wanted >= room
        scan = torch.zeros(steps, heads, dtype=torch.int64, device=queries.device)
        whole = free | ramp
        parts = []
        if bool(whole.any()):
            rows = torch.nonzero(whole)[:, 0]
            parts.append((rows, per_head(span(torch.full_like(tail[rows], self.sink), tail[rows]), heads)))
            scan[rows] = torch.where(free, 0, room * key_bytes)[rows, None].expand(-1, heads)
        for stretch_number in number[~whole].unique().tolist():
            rows = torch.nonzero((number == stretch_number) & ~whole)[:, 0]
            stretch = self._stretch(index, stretch_number)
            probed = nearest(stretch.lists.centroids, queries[rows], self.nprobe)
            if self.dynamic:
                step = positions[rows] - index.store.prompt_length - stretch_number * self.dynamic
                stretch.note(step, queries[rows], probed, self.dynamic)
            found, entries = union(stretch.lists.tokens, probed, tail[rows])
            parts.append((rows, found))
            centroid_bytes = stretch.lists.centroids[0].numel() * layer.item_bytes
            scan[rows] = centroid_bytes + entries * _ENTRY_BYTES + (found >= 0).sum(-1) * key_bytes
        candidates = tail.new_full((steps, heads, max((found.shape[2] for _, found in parts), default=0)), -1)
        for rows, found in parts:
            candidates[rows, :, : found.shape[2]] = found
        return candidates, scan

    def _stretch(self, index: CTkvrIndex, number: int) -> Stretch:
        """The lists of a stretch; those made from probes that have changed since are made anew."""
        for i in range(1, number + 1):
            before = index.stretches[i - 1]
            if i == len(index.stretches) or index.stretches[i].made_from != before.version:
                del index.stretches[i:]
                keys = index.store.keys[:, : index.store.prompt_length + i * self.dynamic]
                lists = self._lists(next_centroids(before), keys, index.store.layer)
                index.stretches.append(Stretch(lists, before.version))
        return index.stretches[number]

    def index_bytes(self, index: CTkvrIndex, layer: LayerInfo) -> int:
        lists = index.stretches[-1].lists
        size = lists.centroids.numel() * layer.item_bytes + int((lists.tokens >= 0).sum()) * _ENTRY_BYTES
        copies = index.store.keys[..., 0].numel() if self.int8 else 0
        return size + copies * (layer.head_dim + INT8_SCALE_BYTES)

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"top_k": max(n, 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "top_k": trial.suggest_int("top_k", 32, max(context_length, 64), log=True),
            "n_centroids": trial.suggest_categorical("n_centroids", [256, 512, 1024]),
            "rho": trial.suggest_categorical("rho", [128, 256, 512, 1024, 2048]),
            "nprobe": trial.suggest_categorical("nprobe", [1, 2, 4, 8, 16]),
        }
