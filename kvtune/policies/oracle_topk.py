"""Exact top-k: the ceiling of every method that retrieves tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.attention.scores import attention_scores
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.keys import KeyStore
from kvtune.policies.layout import per_head, position_blocks, steady_zone


@dataclass(frozen=True)
class OracleTopK(Policy):
    """Steady zone plus the ``tokens`` (1024) keys of largest true probability, shared by a GQA group.

    A key's rank in its group is the sum over the group's query heads of its softmax probability, as
    clusters are ranked in RetroInfer. The decision is free: ``scan_bytes`` is 0, which no real method can
    match. ``sink`` (4) and ``local`` (64) tokens are always attended.
    """

    tokens: int = 1024
    sink: int = 4
    local: int = 64

    name: ClassVar[str] = "oracle_topk"
    title: ClassVar[str] = "Exact top-k (oracle)"
    source: ClassVar[str] = "ceiling of retrieval methods; RetrievalAttention, arXiv 2409.10516"
    budget: ClassVar[str | None] = "tokens"

    def __post_init__(self) -> None:
        check(self.tokens >= 1, self, f"tokens must be 1 or more, not {self.tokens}")
        check(self.sink >= 0, self, f"sink must be 0 or more, not {self.sink}")
        check(self.local >= 1, self, f"local must be 1 or more, not {self.local}")

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> KeyStore:
        return KeyStore(keys, values, layer)

    def select(self, index: KeyStore, queries: Tensor, positions: Tensor) -> Selection:
        steps, heads = queries.shape[:2]
        keys, layer = index.keys, index.layer
        key_positions = torch.arange(keys.shape[1], device=keys.device)
        steady = steady_zone(positions, self.sink, positions + 1 - self.local, layer.window)
        logits = attention_scores(queries, keys, positions, key_positions, layer)
        mass = torch.softmax(logits, -1).sum(2)
        tail_start = (positions + 1 - self.local)[:, None]
        retrievable = (key_positions >= self.sink) & (key_positions < tail_start)
        rank = torch.where(retrievable[:, None, :], mass, -math.inf)
        rank = rank.masked_fill(torch.isinf(logits).all(2), -math.inf)
        best, ranked = torch.topk(rank, min(self.tokens, rank.shape[-1]), dim=-1)
        ranked = torch.where(best == -math.inf, -1, ranked)
        blocks = position_blocks(ranked, keys.shape[1])
        return Selection(
            positions=torch.cat([per_head(steady, heads), ranked], -1),
            scan_bytes=torch.zeros(steps, heads, dtype=torch.int64, device=queries.device),
            resident=steady.shape[1],
            blocks=blocks.ids,
            block_pages=blocks.pages,
            block_tokens=blocks.tokens,
            touched_pages=blocks.touched,
        )

    def append(self, index: KeyStore, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        index.append(keys, values)

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"tokens": max(n, 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {"tokens": trial.suggest_int("tokens", 16, max(context_length, 32), log=True)}
