"""What full attention's decode steps take at their best: flash SDPA over all keys, in one CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from kvtune.models import LoadedModel, PassingCache, attention_through, decode_step


class Held(Protocol):
    """A cache: ``layers`` have ``keys`` [B, H, N, d] and ``values`` [B, H, N, dv]."""

    @property
    def layers(self) -> Sequence[Any]: ...


class _FixedLength:
    """Attends the first ``length`` tokens of a cache (those in its layer's window), whatever the step."""

    def __init__(self, loaded: LoadedModel, cache: Held, length: int) -> None:
        self.loaded, self.cache, self.length = loaded, cache, length

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        number = int(module.layer_idx)  # type: ignore[arg-type]
        info = self.loaded.geometry.layer(number)
        start = 0 if info.window is None else max(self.length - info.window, 0)
        held: Any = self.cache.layers[number]
        keys, values = (part[:, :, start : self.length] for part in (held.keys, held.values))
        out = scaled_dot_product_attention(query, keys, values, scale=info.scaling, enable_gqa=True)
        return out.transpose(1, 2), None


def time_full_steps(loaded: LoadedModel, cache: Held, length: int, steps: int) -> list[float]:
    """Seconds of each of ``steps`` decode steps over the first ``length`` tokens of ``cache``.

    All sequences of the cache take part; every step is at the same position and none is kept. Empty where
    a CUDA graph cannot be had or a layer caps its logits (SDPA does not).
    """
    capped = any(softcap is not None for softcap in loaded.geometry.softcaps)
    if loaded.device.type != "cuda" or capped or not steps:
        return []
    held: Any = cache.layers[0]
    token = torch.zeros(len(held.keys), 1, dtype=torch.int64, device=loaded.device)
    position = torch.full_like(token, length)
    passing = PassingCache()
    with attention_through(loaded.model, _FixedLength(loaded, cache, length)):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            decode_step(loaded.model, token, position, passing)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                decode_step(loaded.model, token, position, passing)
        except RuntimeError:
            return []
    return [_timed(graph) for _ in range(steps + 1)][1:]


def _timed(graph: torch.cuda.CUDAGraph) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - started
