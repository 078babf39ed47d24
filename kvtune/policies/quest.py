"""Quest: pages ranked by an upper bound on their best key's score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.attention.scores import shape_scores
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.layout import best_blocks, consecutive_blocks, per_head, retrieval, steady_zone


@dataclass
class QuestPages:
    """Channel-wise bounds of the complete pages, low and high [H, P, d], and the keys of the partial one."""

    layer: LayerInfo
    low: Tensor
    high: Tensor
    rest: Tensor


@dataclass(frozen=True)
class Quest(Policy):
    """Read the ``page_size`` (16)-token pages whose bound on q·k is highest, ``token_budget`` (1024) in all.

    Per page, the minimum and maximum of every key channel are kept; Σ_c max(q_c·min_c, q_c·max_c) is never
    below the page's best q·k. As in the paper's kernels, the page being written (that of the current token)
    is always read and counts towards the budget, the budget is 3 pages at least, and where every page fits
    nothing is scored.

    Differences: the paper selects per query head and has no grouped heads; here the query heads of a group
    share pages, ranked by the highest bound in the group, so that one read serves them all. The paper keeps
    the first two layers dense: leave them to the plan (``dense_layers=(0, 1)``). With ALiBi the bound takes
    the page's nearest token. A layer with a window of its own is refused.
    """

    token_budget: int = 1024
    page_size: int = 16

    name: ClassVar[str] = "quest"
    title: ClassVar[str] = "Quest"
    source: ClassVar[str] = "Tang et al., arXiv 2406.10774; mit-han-lab/Quest"
    budget: ClassVar[str | None] = "token_budget"

    def __post_init__(self) -> None:
        check(self.token_budget >= 1, self, f"token_budget must be 1 or more, not {self.token_budget}")
        check(self.page_size >= 1, self, f"page_size must be 1 or more, not {self.page_size}")

    def build_key(self) -> tuple[Any, ...]:
        return (self.page_size,)

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> QuestPages:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        none = keys[:, :0]
        index = QuestPages(layer, low=none, high=none, rest=none)
        self._extend(index, keys)
        return index

    def append(self, index: QuestPages, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self._extend(index, keys)

    def _extend(self, index: QuestPages, keys: Tensor) -> None:
        rest = torch.cat([index.rest, keys], 1)
        whole = rest.shape[1] // self.page_size * self.page_size
        if whole:
            pages = rest[:, :whole].unflatten(1, (-1, self.page_size))
            index.low = torch.cat([index.low, pages.amin(2)], 1)
            index.high = torch.cat([index.high, pages.amax(2)], 1)
        index.rest = rest[:, whole:]

    def select(self, index: QuestPages, queries: Tensor, positions: Tensor) -> Selection:
        heads, layer, size = queries.shape[1], index.layer, self.page_size
        page = torch.arange(index.low.shape[1], device=queries.device)
        own = positions // size
        earlier = page < own[:, None]
        distance = positions[:, None] - (page + 1) * size + 1
        bound = shape_scores(page_bound(queries, index.low, index.high), layer, distance[:, None, None])
        count = max(self.token_budget // size, 3) - 1
        tokens, blocks = consecutive_blocks(best_blocks(bound.amax(2), earlier[:, None], count), size)
        scan = torch.where(own > count, own, 0) * 2 * layer.head_dim * layer.item_bytes
        steady = steady_zone(positions, 0, own * size)
        return retrieval(per_head(steady, heads), tokens, blocks, scan[:, None].expand(-1, heads))

    def index_bytes(self, index: QuestPages, layer: LayerInfo) -> int:
        return (index.low.numel() + index.high.numel()) * layer.item_bytes

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"token_budget": n + 2 * cls.page_size}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "token_budget": trial.suggest_int("token_budget", 64, max(context_length, 128), log=True),
            "page_size": trial.suggest_categorical("page_size", [8, 16, 32]),
        }


def page_bound(queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Upper bound on q·k over each page: queries [T, H, G, d], low and high [H, P, d] → [T, H, G, P]."""
    q = queries.float()
    upper = torch.einsum("thgd,hpd->thgp", q.clamp_min(0), high.float())
    return upper + torch.einsum("thgd,hpd->thgp", q.clamp_max(0), low.float())
