"""MagicPIG: keys sampled by locality-sensitive hashing, and reweighted so that the estimate is unbiased."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.keys import KeyStore
from kvtune.policies.layout import best_blocks, per_head, position_blocks, retrieval, steady_zone
from kvtune.policies.simhash import buckets, collisions, hyperplanes, sampling_probability


@dataclass
class HashedKeys:
    """Keys (the store's keys) and their bucket in each table (its values, [H, n, L] int16).

    mean [H, 1, d] float32 centres the keys; planes [K, L, d] float32 are the hyperplanes of all tables.
    """

    layer: LayerInfo
    store: KeyStore
    mean: Tensor
    planes: Tensor


@dataclass(frozen=True)
class MagicPIG(Policy):
    """Sample the keys that share the query's bucket in ``min_collisions`` (2) of ``tables`` (150) or more.

    A table hashes by the signs of ``bits`` (10) random projections (SimHash), of queries as they are and of
    keys minus the mean of the prompt's keys between sinks and local window. A key whose angle to the
    query is θ collides in one table with probability a = (1 − θ/π)^bits, hence is sampled with u = P(at least
    ``min_collisions`` of ``tables`` trials of probability a); its weight is divided by u
    (``log_weights`` −ln u), which makes numerator and denominator of the softmax unbiased over ``seed`` (0).
    Every query head samples for itself: a group reads the union, and a token that a head did not sample
    has weight 0 there (−inf). ``sink`` (4) and ``local`` (64) tokens are always attended, at weight 1. The
    paper keeps layers 0, 16, 32 … dense: leave them to the plan (``dense_layers=(0, 16)``).

    A step reads, per query head and table, one bucket (two 4-byte offsets and a 4-byte id per key in it),
    and once per layer the hyperplanes, here shared out over the kv heads. Tokens are sampled by chance: the
    budget, ``tables``, sets their number only on average.

    Differences: decode-made tokens are hashed once they leave the local window (the authors' code keeps
    them all resident). ALiBi and softcap act on the exact score, not on the sampling, which stays
    unbiased. A zero vector counts as orthogonal to all. A layer with a window of its own is refused.
    """

    tables: int = 150
    bits: int = 10
    min_collisions: int = 2
    sink: int = 4
    local: int = 64
    seed: int = 0

    name: ClassVar[str] = "magicpig"
    title: ClassVar[str] = "MagicPIG"
    source: ClassVar[str] = "Chen et al., arXiv 2410.16179; Infini-AI-Lab/MagicPIG"
    budget: ClassVar[str | None] = "tables"

    def __post_init__(self) -> None:
        check(1 <= self.bits <= 15, self, f"bits must lie in 1…15, not {self.bits}")
        check(1 <= self.tables <= 10_000, self, f"tables must lie in 1…10000, not {self.tables}")
        check(
            1 <= self.min_collisions <= self.tables,
            self,
            f"min_collisions must lie in 1…tables ({self.tables}), not {self.min_collisions}",
        )
        check(self.local >= 1, self, f"local must be 1 or more, not {self.local}")
        for name in ("sink", "seed"):
            check(getattr(self, name) >= 0, self, f"{name} must be 0 or more, not {getattr(self, name)}")

    def build_key(self) -> tuple[Any, ...]:
        return (self.tables, self.bits, self.sink, self.local, self.seed)

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> HashedKeys:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        between = keys[:, self.sink : max(keys.shape[1] - self.local, 0)]
        mean = (between if between.shape[1] else keys).mean(1, keepdim=True, dtype=torch.float32)
        planes = hyperplanes(self.tables, self.bits, layer.head_dim, self.seed).to(keys.device)
        store = KeyStore(keys, buckets(keys - mean, planes), layer)
        return HashedKeys(layer, store, mean, planes)

    def append(self, index: HashedKeys, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        index.store.append(keys, buckets(keys - index.mean, index.planes))

    def select(self, index: HashedKeys, queries: Tensor, positions: Tensor) -> Selection:
        heads, layer, store = queries.shape[1], index.layer, index.store
        token = torch.arange(store.length, device=queries.device)
        tail = (positions + 1 - self.local).clamp_min(self.sink)
        hashed = ((token >= self.sink) & (token < tail[:, None]))[:, None, None]
        shared = collisions(buckets(queries, index.planes), store.values).masked_fill(~hashed, 0)
        sampled = shared >= self.min_collisions
        union = sampled.any(2)
        ranking = shared.amax(2).float()
        tokens = best_blocks(ranking, union, int(union.sum(-1).max()) if len(positions) else 0)
        steady = per_head(steady_zone(positions, self.sink, tail), heads)
        scan = self._scan_bytes(shared, layer) * (tail > self.sink)[:, None]
        selection = retrieval(steady, tokens, position_blocks(tokens, store.length), scan)
        selection.log_weights = self._log_weights(index, queries, sampled, tokens, steady.shape[2])
        return selection

    def _scan_bytes(self, shared: Tensor, layer: LayerInfo) -> Tensor:
        """Buckets read by all query heads of a group, and the kv head's share of the hyperplanes, [T, H]."""
        ids = 4 * shared.sum((-2, -1), dtype=torch.int64)
        return ids + 8 * self.tables * layer.group + -(-self._plane_bytes(layer) // layer.n_kv_heads)

    def _plane_bytes(self, layer: LayerInfo) -> int:
        return self.tables * self.bits * layer.head_dim * layer.item_bytes

    def index_bytes(self, index: HashedKeys, layer: LayerInfo) -> int:
        """Per table, 4 bytes for every token's id and every bucket's offset; and the hyperplanes."""
        tokens = max(index.store.length - self.sink - self.local, 0)
        return layer.n_kv_heads * self.tables * 4 * (tokens + (1 << self.bits)) + self._plane_bytes(layer)

    def _log_weights(
        self, index: HashedKeys, queries: Tensor, sampled: Tensor, tokens: Tensor, resident: int
    ) -> Tensor:
        """−ln u of the tokens each query head sampled, −inf of the others, 0 of residents: [T, H, G, S]."""
        steps, heads, group, _ = queries.shape
        keys, head = index.store.keys, torch.arange(heads, device=queries.device)[:, None]
        weights = queries.new_zeros(steps, heads, group, resident + tokens.shape[2], dtype=torch.float32)
        unit_queries = normalize(queries.float(), dim=-1)
        for step, chosen in enumerate(tokens.clamp_min(0)):
            unit_keys = normalize(keys[head, chosen].float() - index.mean, dim=-1)
            cosine = torch.matmul(unit_queries[step], unit_keys.transpose(1, 2))
            share = sampling_probability(cosine, self.bits, self.tables, self.min_collisions)
            mine = torch.gather(sampled[step], 2, chosen[:, None].expand(-1, group, -1))
            logs = -torch.log(share.clamp_min(1e-300)).float()
            weights[step, ..., resident:] = logs.masked_fill(~mine, -math.inf)
        return weights

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"local": max(n, 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "tables": trial.suggest_int("tables", 20, 400, log=True),
            "bits": trial.suggest_int("bits", 6, 12),
            "local": trial.suggest_categorical("local", [16, 32, 64, 128]),
        }
