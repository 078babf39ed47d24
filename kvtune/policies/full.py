"""Full attention: every key, exactly. The measure of all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo
from kvtune.policies.base import Policy, Selection
from kvtune.policies.layout import per_head, steady_zone


@dataclass(frozen=True)
class Full(Policy):
    """Attend all keys (inside the layer's window). Reads the whole cache; decides nothing."""

    name: ClassVar[str] = "full"
    title: ClassVar[str] = "Full attention"
    source: ClassVar[str] = "Vaswani et al., arXiv 1706.03762"

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> LayerInfo:
        return layer

    def select(self, index: LayerInfo, queries: Tensor, positions: Tensor) -> Selection:
        steps, heads = queries.shape[:2]
        rows = steady_zone(positions, 0, torch.zeros_like(positions), index.window)
        scan = torch.zeros(steps, heads, dtype=torch.int64, device=queries.device)
        return Selection(per_head(rows, heads), scan)

    def append(self, index: Any, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Nothing to keep: the selection follows from the positions."""

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {}
