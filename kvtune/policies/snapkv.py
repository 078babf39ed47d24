"""SnapKV: the prompt compressed once, to what its last queries attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection, check
from kvtune.policies.layout import per_head, steady_zone
from kvtune.policies.observed import best_tokens, no_prompt_queries, pooled, summed_attention


@dataclass
class RankedPrompt:
    """The prompt's tokens before the window, best first, [H, max(N - window, 0)].

    ``ranked`` is ``None`` where the trace holds no prompt queries to rank them by.
    """

    layer: LayerInfo
    length: int
    ranked: Tensor | None


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep ``capacity`` (1024) tokens of the prompt: its last ``window`` (64), and those they attend most.

    Attention of the window's queries over the earlier tokens (softmax over all keys) is summed over the
    window and the GQA group, smoothed along the tokens by ``pooling`` (``avg``, or ``max``) of ``kernel``
    (5), and the best capacity - window tokens stay. This happens once, after prefill: a dropped token never
    returns, every later token stays. A prompt of at most ``capacity`` tokens is kept whole.

    Differences: the paper's code chooses per query head, after repeating the keys of grouped heads; here one
    choice serves a kv head, by the sum over its group, as in KVCache-Factory and kvpress (both take the
    mean: the same order). The code's own defaults are capacity 2048 and window 32; the paper's tables run
    1024, 2048 and 4096. Scores stay float32 where the code rounds them to the model's precision. With fewer
    recorded prompt queries than ``window`` those decide; with none, a prompt above ``capacity`` is
    refused, as is a layer with a window of its own. In later turns the questions are not compressed.
    """

    capacity: int = 1024
    window: int = 64
    kernel: int = 5
    pooling: str = "avg"

    name: ClassVar[str] = "snapkv"
    title: ClassVar[str] = "SnapKV"
    source: ClassVar[str] = "Li et al., arXiv 2404.14469; FasterDecoding/SnapKV"
    budget: ClassVar[str | None] = "capacity"
    evicts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check(self.window >= 1, self, f"window must be 1 or more, not {self.window}")
        check(self.capacity > self.window, self, f"capacity must exceed the window of {self.window} tokens")
        check(self.kernel >= 1 and self.kernel % 2 == 1, self, f"kernel must be odd, not {self.kernel}")
        check(self.pooling in ("avg", "max"), self, f"pooling is 'avg' or 'max', not '{self.pooling}'")

    @property
    def prompt_window(self) -> int:
        return self.window

    def build_key(self) -> tuple[Any, ...]:
        return (self.window, self.kernel, self.pooling)

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> RankedPrompt:
        check(layer.window is None, self, f"layer {layer.layer} has a sliding window; keep it dense")
        n = keys.shape[1]
        earlier = n - self.window
        if earlier <= 0 or prompt_queries.shape[2] == 0:
            return RankedPrompt(layer, n, None)
        scores = summed_attention(prompt_queries, keys, layer)[:, :earlier]
        ranked = best_tokens(pooled(scores, self.kernel, self.pooling), earlier)
        return RankedPrompt(layer, n, ranked)

    def append(self, index: RankedPrompt, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Nothing to keep: tokens after the prompt all stay."""

    def past_tokens(self, length: int, layer: LayerInfo) -> int:
        """Tokens kept of a prompt of ``length`` tokens, those in the window apart."""
        return min(length, self.capacity) - self.window

    def select(self, index: RankedPrompt, queries: Tensor, positions: Tensor) -> Selection:
        steps, heads = queries.shape[:2]
        scan = torch.zeros(steps, heads, dtype=torch.int64, device=queries.device)
        earlier = index.length - self.window
        past = self.past_tokens(index.length, index.layer)
        if past >= earlier:
            whole = steady_zone(positions, 0, torch.zeros_like(positions))
            return Selection(per_head(whole, heads), scan)
        if index.ranked is None:
            raise no_prompt_queries(self, index.layer)
        kept = index.ranked[:, :past].sort(-1).values
        tail = steady_zone(positions, 0, torch.full_like(positions, earlier))
        return Selection(torch.cat([kept.expand(steps, -1, -1), per_head(tail, heads)], -1), scan)

    @classmethod
    def lossless(cls, n: int) -> dict[str, Any]:
        return {"capacity": max(n, cls.window + 1)}

    @classmethod
    def search_space(cls, trial: Any, geometry: ModelGeometry, context_length: int) -> dict[str, Any]:
        return {
            "capacity": trial.suggest_int("capacity", 65, max(context_length, 128), log=True),
            "window": trial.suggest_categorical("window", [16, 32, 64]),
            "kernel": trial.suggest_categorical("kernel", [1, 5, 7, 13]),
        }
