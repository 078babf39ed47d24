"""StreamingLLM: attention sinks and the most recent tokens only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.layout import per_head, steady_zone


@dataclass(frozen=True)
class Streaming(Policy):
    """Keep the first ``sink`` (4) and the last ``recent`` (2000) tokens, the current one included.

    Eviction by position: what left the window is never seen again. Positions are those of the full
    sequence (the paper re-numbers them inside the cache; a trace holds post-RoPE keys).
    """

    sink: int = 4
    recent: int = 2000

    name: ClassVar[str] = "streaming"
    title: ClassVar[str] = "StreamingLLM (A-shape)"
    source: ClassVar[str] = "Xiao et al., arXiv 2309.17453"
    budget: ClassVar[str | None] = "recent"

    def __post_init__(self) -> None:
        check(self.sink >= 0, self, f"sink must be 0 or more, not {self.sink}")
        check(self.recent >= 1, self, f"recent must be 1 or more, not {self.recent}")

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> LayerInfo:
        return layer

    def select(self, index: LayerInfo, queries: Tensor, positions: Tensor) -> Selection:
        steps, heads = queries.shape[:2]
        rows = steady_zone(positions, self.sink, positions + 1 - self.recent, index.window)
        scan = torch.zeros(steps, heads, dtype=torch.int64, device=queries.device)
        return Selection(per_head(rows, heads), scan)

    def append(self, index: Any, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Nothing to keep: the selection follows from the positions."""

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"recent": max(n, 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "sink": trial.suggest_categorical("sink", [0, 4, 16]),
            "recent": trial.suggest_int("recent", 32, max(context_length, 64), log=True),
        }
