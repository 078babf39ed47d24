"""The live state of one sequence: each layer's index, its block caches, and the log of what they did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtune.attention import group_queries, sparse_attention
from kvtune.caching import AccessLog, UnitAccesses, capacity_pages
from kvtune.caching.access_log import join_accesses, unit_accesses
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection
from kvtune.policies.full import Full
from kvtune.policies.plan import Plan
from kvtune.runtime.block_cache import BlockCache


@dataclass
class LayerState:
    """One layer while a sequence decodes.

    ``length`` tokens have passed; ``index`` exists from the first decode step on; ``hits`` holds one mask
    per step and kv head.
    """

    info: LayerInfo
    policy: Policy
    length: int = 0
    prompt_length: int = 0
    index: Any = None
    prompt_queries: Tensor | None = None
    caches: list[BlockCache] = field(default_factory=list)
    accesses: list[list[UnitAccesses]] = field(default_factory=list)
    hits: list[list[list[bool]]] = field(default_factory=list)

    @property
    def dense(self) -> bool:
        """Whether the layer keeps full attention."""
        return isinstance(self.policy, Full)


class Sequence:
    """Decodes one sequence under a plan. Prefill is dense; the index is built at the first decode step.

    ``cache_fraction`` sizes each unit's block cache (``None``: no cache is kept and nothing is counted).
    Several tokens at once are always a prefill; a caller that prefills a single token sets ``prefilling``.
    """

    prefilling = False

    def __init__(self, plan: Plan, geometry: ModelGeometry, cache_fraction: float | None = None) -> None:
        self.plan = plan
        self.geometry = geometry
        self.cache_fraction = cache_fraction
        self.layers: dict[int, LayerState] = {}

    def layer(self, number: int) -> LayerState:
        """The state of layer ``number``, made on first use."""
        if number not in self.layers:
            info = self.geometry.layer(number)
            self.layers[number] = LayerState(info, self.plan.for_layer(info))
        return self.layers[number]

    def prefill(self, number: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Note a stretch of several tokens, attended densely by the caller.

        queries [T, Hq, d] of the stretch; keys [H, N, d], values [H, N, dv] of the whole sequence so far.
        """
        steps, total = len(queries), keys.shape[1]
        if self.layer(number).length != total - steps:
            self.layers[number] = LayerState(self.layer(number).info, self.layer(number).policy)
        state = self.layer(number)
        if state.dense:
            state.length = total
            return
        if state.index is None:
            window = state.policy.prompt_window
            fresh = group_queries(queries[-window:] if window else queries[:0], keys.shape[0]).permute(
                1, 2, 0, 3
            )
            seen = fresh if state.prompt_queries is None else torch.cat([state.prompt_queries, fresh], 2)
            state.prompt_queries = seen[:, :, -window:].clone() if window else seen
        else:
            self._append(state, keys, values, total)
        state.length = total

    def decode(self, number: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention output [Hq, dv] of one new token. query [Hq, d]; keys and values include its own."""
        state = self.layer(number)
        total = keys.shape[1]
        if state.length != total - 1:
            state = self.layers[number] = LayerState(state.info, state.policy)
        if state.index is None:
            self._build(state, keys, values, total - 1)
        self._append(state, keys, values, total)
        state.length = total
        queries = group_queries(query[None], keys.shape[0])
        position = torch.tensor([total - 1], device=keys.device)
        selection = state.policy.select(state.index, queries, position)
        self._look_up(state, selection)
        output, _ = sparse_attention(queries, position, keys, values, selection, state.info)
        return output[0].flatten(0, 1)

    def access_log(self, sample: int = 0, timeline: int = 0) -> AccessLog:
        """What every unit asked of its cache so far."""
        log = AccessLog(page_bytes=self.geometry.layer(0).page_bytes)
        for number, state in self.layers.items():
            for head, parts in enumerate(state.accesses):
                log.units[sample, timeline, number, head] = join_accesses(parts, state.prompt_length)
        return log

    def hit_masks(self, sample: int = 0, timeline: int = 0) -> dict[tuple[int, int, int, int], list[bool]]:
        """Whether each access of each unit was a hit, in the order of its log."""
        return {
            (sample, timeline, number, head): [hit for step in masks for hit in step]
            for number, state in self.layers.items()
            for head, masks in enumerate(state.hits)
        }

    def _build(self, state: LayerState, keys: Tensor, values: Tensor, length: int) -> None:
        heads, dim = keys.shape[0], keys.shape[2]
        seen = state.prompt_queries
        if seen is None:
            seen = keys.new_zeros(heads, state.info.group, 0, dim)
        state.index = state.policy.build(keys[:, :length], values[:, :length], seen, state.info)
        state.length = state.prompt_length = length
        if self.cache_fraction is not None:
            pages = capacity_pages(self.cache_fraction, length)
            state.caches = [BlockCache(pages) for _ in range(heads)]
            state.accesses = [[] for _ in range(heads)]
            state.hits = [[] for _ in range(heads)]

    def _append(self, state: LayerState, keys: Tensor, values: Tensor, total: int) -> None:
        new = slice(state.length, total)
        positions = torch.arange(state.length, total, device=keys.device)
        state.policy.append(state.index, keys[:, new], values[:, new], positions)

    def _look_up(self, state: LayerState, selection: Selection) -> None:
        """Pass the step's blocks through each kv head's cache and note what happened."""
        for head, cache in enumerate(state.caches):
            step = unit_accesses(selection, head, state.prompt_length)
            columns = [np.asarray(c).tolist() for c in (step.blocks, step.pages, step.tokens)]
            state.hits[head].append(cache.access(*columns))
            cache.update()
            state.accesses[head].append(step)
