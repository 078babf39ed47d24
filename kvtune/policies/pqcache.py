"""PQCache: tokens ranked by product-quantised keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.attention.scores import shape_scores
from kvtune.clustering.faiss_index import train_codebook
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.keys import KeyStore
from kvtune.policies.layout import best_blocks, per_head, position_blocks, retrieval, steady_zone

CACHE_BLOCK = 128
"""Tokens per block of PQCache's GPU cache."""


@dataclass
class QuantisedKeys:
    """Keys and their codes. The codebook is learned from the tokens sink … trained_at-1.

    codebook [H, M, K, d / M] float32 (``None`` until ``trained_at`` tokens are there); codes [H, n, M]
    uint8 (int32 where K > 256) of the tokens from ``sink`` on.
    """

    layer: LayerInfo
    store: KeyStore
    trained_at: int
    codebook: Tensor | None
    codes: Tensor


@dataclass(frozen=True)
class PQCache(Policy):
    """``token_budget`` (2048) tokens: a ``recent_share`` (0.5) the most recent, the others by quantised q·k.

    Keys after the first ``sink`` (32) are cut into ``subvectors`` (2), and each kv head's subvectors coded by
    the nearest of 2^``bits`` (6) centroids, which Faiss learns from the prompt (k-means, ``seed`` 0). A step
    looks up q·centroid for every code, adds up the subvectors, and ranks tokens by the softmax over the
    candidates, summed over the query heads of a group, as the authors' code does. Sinks come on top of the
    budget. A step reads one code per candidate (whole bytes) and the codebook; where all candidates fit,
    nothing. A cache fetches 128-token blocks.

    A token is coded by the prompt's centroids once it is there and ranked once it has left the recent
    window. A prompt with fewer than 2^bits tokens after its sinks is attended in full until there are so
    many, which then train the codebook. A head dimension that ``subvectors`` does not divide is refused,
    and a layer with a window of its own.

    Differences: the authors fit a share of the prompt (1/5, 1/10), here the budget is a number of tokens;
    their clustering stops early to hide behind prefill, here it runs its 25 iterations (on at most 256 keys
    per centroid, Faiss's sample).
    """

    token_budget: int = 2048
    recent_share: float = 0.5
    sink: int = 32
    subvectors: int = 2
    bits: int = 6
    seed: int = 0

    name: ClassVar[str] = "pqcache"
    title: ClassVar[str] = "PQCache"
    source: ClassVar[str] = "Zhang et al., arXiv 2407.12820; HugoZHL/PQCache; Faiss PQ"
    budget: ClassVar[str | None] = "token_budget"

    def __post_init__(self) -> None:
        check(self.token_budget >= 2, self, f"token_budget must be 2 or more, not {self.token_budget}")
        check(0 < self.recent_share < 1, self, f"recent_share must lie in (0, 1), not {self.recent_share}")
        check(self.subvectors >= 1, self, f"subvectors must be 1 or more, not {self.subvectors}")
        check(1 <= self.bits <= 12, self, f"bits must lie in 1…12, not {self.bits}")
        for name in ("sink", "seed"):
            check(getattr(self, name) >= 0, self, f"{name} must be 0 or more, not {getattr(self, name)}")

    @property
    def recent(self) -> int:
        """Tokens of the recent window."""
        return min(max(int(self.token_budget * self.recent_share), 1), self.token_budget - 1)

    def build_key(self) -> tuple[Any, ...]:
        return (self.sink, self.subvectors, self.bits, self.seed)

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> QuantisedKeys:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        check(
            layer.head_dim % self.subvectors == 0,
            self,
            f"a head dimension of {layer.head_dim} does not divide into {self.subvectors} subvectors",
        )
        dtype = torch.uint8 if self.bits <= 8 else torch.int32
        codes = torch.zeros(keys.shape[0], 0, self.subvectors, dtype=dtype, device=keys.device)
        enough = max(keys.shape[1], self.sink + (1 << self.bits))
        index = QuantisedKeys(layer, KeyStore(keys, values, layer), enough, None, codes)
        self._extend(index)
        return index

    def append(self, index: QuantisedKeys, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        index.store.append(keys, values)
        self._extend(index)

    def _extend(self, index: QuantisedKeys) -> None:
        """Learn the codebook once there are tokens enough; code the tokens that have no code."""
        keys = index.store.keys
        if keys.shape[1] < index.trained_at:
            return
        if index.codebook is None:
            training = keys[:, self.sink : index.trained_at]
            books = [train_codebook(rows, self.subvectors, self.bits, self.seed) for rows in training]
            index.codebook = torch.stack(books).to(keys.device)
        new = keys[:, self.sink + index.codes.shape[1] :]
        index.codes = torch.cat([index.codes, nearest_codes(new, index.codebook).to(index.codes.dtype)], 1)

    def select(self, index: QuantisedKeys, queries: Tensor, positions: Tensor) -> Selection:
        heads, layer = queries.shape[1], index.layer
        trained = positions + 1 >= index.trained_at
        tail = torch.where(trained, positions + 1 - self.recent, self.sink).clamp_min(self.sink)
        candidates = tail - self.sink
        kept = self.token_budget - self.recent
        searched = candidates > kept
        token = self.sink + torch.arange(index.codes.shape[1], device=queries.device)
        allowed = (token < tail[:, None])[:, None]
        if index.codebook is None:
            share = queries.new_zeros(len(positions), heads, 0, dtype=torch.float32)
        else:
            dots = quantised_dots(queries, index.codebook, index.codes)
            distance = (positions[:, None] - token)[:, None, None]
            logits = shape_scores(dots, layer, distance).masked_fill(~allowed[:, :, None], -math.inf)
            share = torch.softmax(logits, -1).sum(2)
        ranked = best_blocks(share, allowed, kept)
        tokens = torch.where(ranked < 0, -1, ranked + self.sink)
        scan = torch.where(searched, self._stored(candidates, layer), 0)[:, None].expand(-1, heads)
        steady = per_head(steady_zone(positions, self.sink, tail), heads)
        return retrieval(steady, tokens, position_blocks(tokens, index.store.length, CACHE_BLOCK), scan)

    def index_bytes(self, index: QuantisedKeys, layer: LayerInfo) -> int:
        heads, coded, _ = index.codes.shape
        return 0 if index.codebook is None else heads * self._stored(coded, layer)

    def _stored(self, coded: Any, layer: LayerInfo) -> Any:
        """Bytes of ``coded`` tokens' codes (whole bytes each) and the codebook of one kv head."""
        return (
            coded * -(-self.subvectors * self.bits // 8)
            + (1 << self.bits) * layer.head_dim * layer.item_bytes
        )

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"token_budget": 2 * max(n, 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        halves = [s for s in (1, 2, 4, 8) if geometry.head_dim % s == 0]
        return {
            "token_budget": trial.suggest_int("token_budget", 32, 2 * max(context_length, 32), log=True),
            "recent_share": trial.suggest_float("recent_share", 0.1, 0.9),
            "subvectors": trial.suggest_categorical("subvectors", halves),
            "bits": trial.suggest_categorical("bits", [4, 6, 8]),
        }


def nearest_codes(keys: Tensor, codebook: Tensor) -> Tensor:
    """The nearest centroid of each subvector: keys [H, n, d], codebook [H, M, K, d / M] → [H, n, M] int64."""
    parts = keys.float().unflatten(2, (codebook.shape[1], -1)).transpose(1, 2)
    distance = codebook.square().sum(-1)[:, :, None] - 2 * torch.matmul(parts, codebook.transpose(2, 3))
    return distance.argmin(-1).transpose(1, 2)


def quantised_dots(queries: Tensor, codebook: Tensor, codes: Tensor) -> Tensor:
    """q·(quantised key): queries [T, H, G, d], codes [H, n, M] → [T, H, G, n] float32."""
    parts = queries.float().unflatten(3, (codebook.shape[1], -1))
    total: Tensor | float = 0.0
    for m in range(codebook.shape[1]):
        table = torch.einsum("thgs,hks->thgk", parts[..., m, :], codebook[:, m])
        steps, heads, group, _ = table.shape
        code = codes[:, :, m].long()[None, :, None].expand(steps, heads, group, -1)
        total = total + torch.gather(table, 3, code)
    assert isinstance(total, Tensor)
    return total
