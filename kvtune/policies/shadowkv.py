"""ShadowKV: chunks found through their mean key, with ill-described chunks kept at hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.attention.scores import shape_scores
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.layout import best_blocks, consecutive_blocks, per_head, retrieval, steady_zone


@dataclass
class ShadowLandmarks:
    """Chunks of the prompt: landmarks [H, C, d], which are outliers [H, C] (bool), and their ids [H, O]."""

    layer: LayerInfo
    landmarks: Tensor
    outlier: Tensor
    outlier_ids: Tensor


@dataclass(frozen=True)
class ShadowKV(Policy):
    """Retrieve ``sparse_budget`` (2048) tokens as ``chunk`` (8)-token chunks ranked by their mean key.

    A landmark is the mean of a chunk's post-RoPE keys. The ``outlier_chunks`` (48) chunks whose least similar
    key (cosine to the landmark) is the worst stay resident, as do the last ``local_chunks`` (4), the
    prompt's remainder and every later token. The other chunks rank by softmax(q·landmark), the
    maximum over the GQA group as in the paper's Algorithm 2 and code. Where every chunk fits, nothing is
    scored. A prompt with fewer chunks than outliers is resident whole.

    Differences: the low-rank pre-RoPE keys (rank 160) concern storage, not choice, and are not modelled:
    attention here reads the true keys. The method fetches only values and rebuilds keys on the GPU,
    whereas a block's pages hold keys and values: halve a simulated transfer to compare. The code never
    chunks later tokens, so in long decodes and later turns the resident tail grows. A layer with a
    window of its own is refused.
    """

    sparse_budget: int = 2048
    chunk: int = 8
    outlier_chunks: int = 48
    local_chunks: int = 4

    name: ClassVar[str] = "shadowkv"
    title: ClassVar[str] = "ShadowKV landmarks"
    source: ClassVar[str] = "Sun et al., arXiv 2410.21465; bytedance/ShadowKV"
    budget: ClassVar[str | None] = "sparse_budget"

    def __post_init__(self) -> None:
        check(self.chunk >= 1, self, f"chunk must be 1 or more, not {self.chunk}")
        check(self.sparse_budget >= self.chunk, self, "sparse_budget must be one chunk or more")
        for name in ("outlier_chunks", "local_chunks"):
            check(getattr(self, name) >= 0, self, f"{name} must be 0 or more, not {getattr(self, name)}")

    def build_key(self) -> tuple[Any, ...]:
        return (self.chunk, self.outlier_chunks, self.local_chunks)

    def build(
        self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo
    ) -> ShadowLandmarks:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        n_chunks = max(keys.shape[1] // self.chunk - self.local_chunks, 0)
        chunks = keys[:, : n_chunks * self.chunk].float().unflatten(1, (n_chunks, self.chunk))
        means = chunks.mean(2)
        likeness = torch.cosine_similarity(chunks, means[:, :, None], dim=-1).amin(2)
        worst = torch.argsort(likeness, dim=1, stable=True)[:, : self.outlier_chunks]
        outlier = torch.zeros_like(likeness, dtype=torch.bool).scatter_(1, worst, True)
        return ShadowLandmarks(layer, means.to(keys.dtype), outlier, worst)

    def append(self, index: ShadowLandmarks, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Nothing to keep: tokens after the prompt stay resident."""

    def select(self, index: ShadowLandmarks, queries: Tensor, positions: Tensor) -> Selection:
        steps, heads = queries.shape[:2]
        chunk = torch.arange(index.landmarks.shape[1], device=queries.device)
        count = self.sparse_budget // self.chunk
        dots = torch.einsum("thgd,hcd->thgc", queries.float(), index.landmarks.float())
        distance = positions[:, None] - chunk * self.chunk - (self.chunk - 1) / 2
        logits = shape_scores(dots, index.layer, distance[:, None, None])
        share = logits.masked_fill(index.outlier[:, None], -math.inf).softmax(-1).amax(2)
        tokens, blocks = consecutive_blocks(best_blocks(share, ~index.outlier, count), self.chunk)
        outliers, _ = consecutive_blocks(index.outlier_ids.expand(steps, -1, -1), self.chunk)
        tail = steady_zone(positions, 0, torch.full_like(positions, len(chunk) * self.chunk))
        resident = torch.cat([per_head(tail, heads), outliers], -1)
        scored = len(chunk) - index.outlier_ids.shape[1]
        scan = (scored if scored > count else 0) * index.layer.head_dim * index.layer.item_bytes
        return retrieval(resident, tokens, blocks, positions.new_full((steps, heads), scan))

    def index_bytes(self, index: ShadowLandmarks, layer: LayerInfo) -> int:
        return index.landmarks.numel() * layer.item_bytes + index.outlier_ids.numel() * 4

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"sparse_budget": max(n, cls.chunk)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "sparse_budget": trial.suggest_int("sparse_budget", 32, max(context_length, 64), log=True),
            "outlier_chunks": trial.suggest_categorical("outlier_chunks", [0, 16, 48, 96]),
        }
