"""Sliding window: the most recent tokens only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.layout import per_head, steady_zone


@dataclass(frozen=True)
class SlidingWindow(Policy):
    """Attend the last ``window`` (4096) tokens, the current one included, and nothing before them.

    In hybrid models the window is part of some layers (Mistral, Gemma 2, gpt-oss); this imposes one on the
    others, without attention sinks. A layer whose own window is shorter keeps its own. Nothing is read to
    decide.
    """

    window: int = 4096

    name: ClassVar[str] = "sliding_window"
    title: ClassVar[str] = "Sliding window"
    source: ClassVar[str] = "Beltagy et al., arXiv 2004.05150; Mistral 7B, arXiv 2310.06825"
    budget: ClassVar[str | None] = "window"

    def __post_init__(self) -> None:
        check(self.window >= 1, self, f"window must be 1 or more, not {self.window}")

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> LayerInfo:
        return layer

    def build_key(self) -> tuple[Any, ...]:
        return ()

    def select(self, index: LayerInfo, queries: Tensor, positions: Tensor) -> Selection:
        steps, heads = queries.shape[:2]
        rows = steady_zone(positions, 0, positions + 1 - self.window, index.window)
        scan = torch.zeros(steps, heads, dtype=torch.int64, device=queries.device)
        return Selection(per_head(rows, heads), scan)

    def append(self, index: Any, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Nothing to keep: the selection follows from the positions."""

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"window": max(n, 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {"window": trial.suggest_int("window", 32, max(context_length, 64), log=True)}
