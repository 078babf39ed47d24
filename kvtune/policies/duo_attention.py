"""DuoAttention: heads that look far keep everything, the others stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.layout import per_head, span, steady_zone
from kvtune.policies.observed import no_prompt_queries, prompt_attention


@dataclass
class HeadReach:
    """Attention mass [H] that the prompt's last queries lose when a head streams.

    ``lost`` is ``None`` where the trace holds no prompt queries; ``length``: tokens of the prompt.
    """

    layer: LayerInfo
    length: int
    lost: Tensor | None


@dataclass(frozen=True)
class DuoAttention(Policy):
    """Streaming heads attend ``sink`` (64) and ``recent`` (256) tokens, retrieval heads all of them.

    A kv head streams if, over the prompt's last ``prompt_queries`` (256) queries and the head's group, sinks
    and recent tokens hold more than ``coverage`` (0.8) of the attention mass. Larger coverage, more retrieval
    heads; at 1 all are.

    This differs from the paper, which trains one gate a kv head on passkey data, by the deviation of the
    model's output, and takes as retrieval heads those with a gate above 0.5, or a share of all gates of
    a model. Here each layer decides alone, from the trace, without training: the threshold is on attention
    mass and absolute, so the share of retrieval heads depends on model and text (SmolLM2-135M, four prompts
    of 1,000 to 4,000 tokens: 47–62% of the kv heads at 0.8). Mass is what the text at the prompt's end asks
    for: a head that retrieves only when asked looks like a streaming head until then. The paper fixes
    heads once per model; here they are chosen per prompt. A prompt within sink + recent loses nothing: its
    heads stream, save at coverage 1. A layer with a window of its own is refused.
    """

    coverage: float = 0.8
    sink: int = 64
    recent: int = 256
    prompt_queries: int = 256

    name: ClassVar[str] = "duo_attention"
    title: ClassVar[str] = "DuoAttention, heads chosen from the trace"
    source: ClassVar[str] = "Xiao et al., arXiv 2410.10819; mit-han-lab/duo-attention"
    budget: ClassVar[str | None] = "coverage"

    def __post_init__(self) -> None:
        check(0 <= self.coverage <= 1, self, f"coverage must lie in [0, 1], not {self.coverage}")
        check(self.sink >= 0, self, f"sink must be 0 or more, not {self.sink}")
        for name in ("recent", "prompt_queries"):
            check(getattr(self, name) >= 1, self, f"{name} must be 1 or more, not {getattr(self, name)}")

    @property
    def prompt_window(self) -> int:
        return self.prompt_queries

    def build_key(self) -> tuple[Any, ...]:
        return (self.sink, self.recent, self.prompt_queries)

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> HeadReach:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        heads, n, _ = keys.shape
        where = torch.arange(n, device=keys.device)
        lost, queries = torch.zeros(heads, device=keys.device), 0
        for positions, mass in prompt_attention(prompt_queries, keys, layer):
            outside = (where >= self.sink) & (where <= positions[:, None] - self.recent)
            lost += torch.where(outside[:, None, None], mass, 0).sum((0, 2, 3))
            queries += len(positions)
        return HeadReach(layer, n, lost / (queries * layer.group) if queries else None)

    def append(self, index: HeadReach, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Nothing to keep: heads are chosen once, tokens follow from the positions."""

    def retrieval_heads(self, index: HeadReach) -> Tensor:
        """Which kv heads keep every token, bool [H]."""
        if index.lost is None:
            raise no_prompt_queries(self, index.layer)
        return index.lost >= 1 - self.coverage

    def select(self, index: HeadReach, queries: Tensor, positions: Tensor) -> Selection:
        steps, heads = queries.shape[:2]
        full = self.retrieval_heads(index)
        tail_start = positions + 1 - self.recent
        rows = per_head(steady_zone(positions, self.sink, tail_start), heads)
        if full.any():
            between = per_head(span(torch.full_like(positions, self.sink), tail_start), heads)
            rows = torch.cat([rows, torch.where(full[:, None], between, -1)], -1)
        return Selection(rows, torch.zeros(steps, heads, dtype=torch.int64, device=queries.device))

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"coverage": 1.0}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "coverage": trial.suggest_float("coverage", 0.3, 1.0),
            "sink": trial.suggest_categorical("sink", [4, 16, 64]),
            "recent": trial.suggest_categorical("recent", [64, 128, 256, 512]),
        }
