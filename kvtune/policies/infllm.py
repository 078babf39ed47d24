"""InfLLM: 128-token blocks scored through a few representative keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.layout import best_blocks, consecutive_blocks, per_head, retrieval, steady_zone


@dataclass
class InfLLMBlocks:
    """Complete blocks after the initial tokens.

    mean_query [H, G, d] float32, the mean of the recorded prompt queries (``None``: none recorded)
    representatives [H, G, B, d], the mean representative key of each block, per query head
    rest [H, n, d], keys that do not yet fill a block; ``initial``: initial tokens still to come
    """

    layer: LayerInfo
    mean_query: Tensor | None
    representatives: Tensor
    rest: Tensor
    initial: int


@dataclass(frozen=True)
class InfLLM(Policy):
    """Attend ``n_init`` (128) first and ``n_local`` (4096) last tokens and the ``topk`` (16) best blocks.

    Blocks have ``block`` (128) tokens and form when they leave the local window; until then their tokens
    are attended. A block is represented by its ``repr_topk`` (4) keys of highest representative score;
    per query head the index keeps their mean, as the code does, and a block's score is the sum over the
    GQA group of q·mean. Where every block fits, nothing is scored.

    Differences:

    - A key's representative score is, in the paper, its mean q·k over the local-window queries that follow
      it. Only the last ``repr_queries`` (64) prompt queries are recorded, so their mean q·k stands in for
      every key, before or after them; with none recorded, the key's norm does. (The code sums softmax
      probabilities instead of dot products.)
    - Positions are those of the trace: the paper gives all retrieved tokens one relative distance, which
      post-RoPE keys cannot undo. The same goes for ALiBi, which the score leaves out.
    - The code makes one choice for all heads of a layer; here each kv head chooses for its group.
    - A layer with a window of its own is refused.
    """

    n_init: int = 128
    n_local: int = 4096
    block: int = 128
    topk: int = 16
    repr_topk: int = 4
    repr_queries: int = 64

    name: ClassVar[str] = "infllm"
    title: ClassVar[str] = "InfLLM"
    source: ClassVar[str] = "Xiao et al., arXiv 2402.04617; thunlp/InfLLM"
    budget: ClassVar[str | None] = "topk"

    def __post_init__(self) -> None:
        for name in ("n_init", "repr_queries"):
            check(getattr(self, name) >= 0, self, f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("n_local", "block", "topk", "repr_topk"):
            check(getattr(self, name) >= 1, self, f"{name} must be 1 or more, not {getattr(self, name)}")
        check(self.repr_topk <= self.block, self, "repr_topk cannot exceed block")

    @property
    def prompt_window(self) -> int:
        return self.repr_queries

    def build_key(self) -> tuple[Any, ...]:
        return (self.n_init, self.block, self.repr_topk, self.repr_queries)

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> InfLLMBlocks:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        heads, _, dim = keys.shape
        index = InfLLMBlocks(
            layer=layer,
            mean_query=prompt_queries.float().mean(2) if prompt_queries.shape[2] else None,
            representatives=keys.new_zeros(heads, layer.group, 0, dim),
            rest=keys[:, :0],
            initial=self.n_init,
        )
        self._extend(index, keys)
        return index

    def append(self, index: InfLLMBlocks, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self._extend(index, keys)

    def _extend(self, index: InfLLMBlocks, keys: Tensor) -> None:
        initial = min(index.initial, keys.shape[1])
        index.initial -= initial
        rest = torch.cat([index.rest, keys[:, initial:]], 1)
        whole = rest.shape[1] // self.block * self.block
        if whole:
            new = self._represent(index, rest[:, :whole].unflatten(1, (-1, self.block)))
            index.representatives = torch.cat([index.representatives, new], 2)
        index.rest = rest[:, whole:]

    def _represent(self, index: InfLLMBlocks, blocks: Tensor) -> Tensor:
        """Mean of each block's representative keys: [H, B, block, d] → [H, G, B, d]."""
        if index.mean_query is None:
            score = blocks.float().norm(dim=-1)[:, None].expand(-1, index.layer.group, -1, -1)
        else:
            score = torch.einsum("hgd,hbsd->hgbs", index.mean_query, blocks.float())
        best = score.topk(self.repr_topk, dim=-1).indices
        rows = blocks[:, None].expand(-1, index.layer.group, -1, -1, -1)
        chosen = torch.gather(rows, 3, best[..., None].expand(*best.shape, blocks.shape[-1]))
        return chosen.float().mean(3).to(blocks.dtype)

    def select(self, index: InfLLMBlocks, queries: Tensor, positions: Tensor) -> Selection:
        heads, layer = queries.shape[1], index.layer
        formed = (positions - self.n_init - self.n_local).clamp_min(0) // self.block
        scores = torch.einsum("thgd,hgbd->thb", queries.float(), index.representatives.float())
        present = torch.arange(scores.shape[2], device=queries.device) < formed[:, None]
        chosen = best_blocks(scores, present[:, None], self.topk)
        tokens, blocks = consecutive_blocks(chosen, self.block, self.n_init)
        scored = torch.where(formed > self.topk, formed, 0)
        scan = scored * layer.group * layer.head_dim * layer.item_bytes
        steady = steady_zone(positions, self.n_init, self.n_init + formed * self.block)
        return retrieval(per_head(steady, heads), tokens, blocks, scan[:, None].expand(-1, heads))

    def index_bytes(self, index: InfLLMBlocks, layer: LayerInfo) -> int:
        return index.representatives.numel() * layer.item_bytes

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"topk": max(-(-n // cls.block), 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "topk": trial.suggest_int("topk", 1, max(context_length // cls.block, 2), log=True),
            "n_local": trial.suggest_categorical("n_local", [512, 1024, 2048, 4096]),
            "repr_topk": trial.suggest_categorical("repr_topk", [1, 2, 4, 8]),
        }
