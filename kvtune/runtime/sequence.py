"""The live state of one sequence: each layer's index, its block caches, and the log of what they did."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtune.attention import group_queries, sparse_attention
from kvtune.caching import AccessLog, Unit, UnitAccesses, capacity_pages
from kvtune.caching.access_log import join_accesses, unit_accesses
from kvtune.geometry import PAGE_TOKENS, LayerInfo, ModelGeometry
from kvtune.policies.base import Policy, Selection
from kvtune.policies.full import Full
from kvtune.policies.plan import Plan
from kvtune.runtime.block_cache import BlockCache
from kvtune.runtime.forking import fork_index


@dataclass
class LayerState:
    """One layer while a sequence decodes.

    ``length`` tokens have passed, ``prompt_length`` of them before the index was built; ``index`` exists
    from then on; ``hits`` holds one mask per step and kv head. ``steady_pages`` and ``retrieved_pages`` are
    the most of one step, over all kv heads.
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
    steady_pages: int = 0
    retrieved_pages: int = 0

    @property
    def dense(self) -> bool:
        """Whether the layer keeps full attention."""
        return isinstance(self.policy, Full)

    def fork(self) -> LayerState:
        """A copy that goes its own way; tensors are shared (see :func:`fork_index`)."""
        return replace(
            self,
            index=fork_index(self.index),
            caches=copy.deepcopy(self.caches),
            accesses=[list(parts) for parts in self.accesses],
            hits=[list(masks) for masks in self.hits],
        )


class Sequence:
    """Decodes one sequence under a plan. Prefill is dense; the index is built at the first decode step.

    ``cache_fraction`` sizes each unit's block cache (``None``: no cache is kept and nothing is counted).
    Several tokens at once are always a prefill; a caller that prefills a single token sets ``prefilling``.
    Tokens that pass after :meth:`build`, those of a prefill too, join the index as decode-made ones do.
    With ``stages`` set to a mapping, seconds of the decode steps are added to it by stage.
    """

    prefilling = False

    def __init__(self, plan: Plan, geometry: ModelGeometry, cache_fraction: float | None = None) -> None:
        self.plan = plan
        self.geometry = geometry
        self.cache_fraction = cache_fraction
        self.layers: dict[int, LayerState] = {}
        self.stages: dict[str, float] | None = None

    def layer(self, number: int) -> LayerState:
        """The state of layer ``number``, made on first use."""
        if number not in self.layers:
            info = self.geometry.layer(number)
            self.layers[number] = LayerState(info, self.plan.for_layer(info))
        return self.layers[number]

    def fork(self) -> dict[int, LayerState]:
        """The layers' states, to be put back (or a fork of them) as ``layers``."""
        return {number: state.fork() for number, state in self.layers.items()}

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
            self.build(number, keys[:, : total - 1], values[:, : total - 1])
        with self._stage("append"):
            self._append(state, keys, values, total)
            state.length = total
        queries = group_queries(query[None], keys.shape[0])
        position = torch.tensor([total - 1], device=keys.device)
        with self._stage("select"):
            selection = state.policy.select(state.index, queries, position)
        with self._stage("cache"):
            self._look_up(state, selection)
        with self._stage("attend"):
            output, _ = sparse_attention(queries, position, keys, values, selection, state.info)
        return output[0].flatten(0, 1)

    def build(self, number: int, keys: Tensor, values: Tensor) -> None:
        """Index the tokens so far, keys [H, N, d] and values [H, N, dv], with an empty cache a kv head."""
        state = self.layer(number)
        heads, length, dim = keys.shape
        seen = state.prompt_queries
        if seen is None:
            seen = keys.new_zeros(heads, state.info.group, 0, dim)
        state.index = state.policy.build(keys, values, seen, state.info)
        state.length = state.prompt_length = length
        if self.cache_fraction is not None:
            pages = capacity_pages(self.cache_fraction, length)
            state.caches = [BlockCache(pages) for _ in range(heads)]
            state.accesses = [[] for _ in range(heads)]
            state.hits = [[] for _ in range(heads)]

    def access_log(self, sample: int = 0, timeline: int = 0) -> AccessLog:
        """What every unit asked of its cache so far."""
        log = AccessLog(page_bytes=self.geometry.layer(0).page_bytes)
        for number, state in self.layers.items():
            for head, parts in enumerate(state.accesses):
                log.units[sample, timeline, number, head] = join_accesses(parts, state.prompt_length)
        return log

    def hit_masks(self, sample: int = 0, timeline: int = 0) -> dict[Unit, list[bool]]:
        """Whether each access of each unit was a hit, in the order of its log."""
        return {
            (sample, timeline, number, head): [hit for step in masks for hit in step]
            for number, state in self.layers.items()
            for head, masks in enumerate(state.hits)
        }

    def counters(self) -> dict[str, tuple[int, int]]:
        """Hits and accesses of all block caches in requests, pages and tokens."""
        counted = [cache.counters for state in self.layers.values() for cache in state.caches]
        columns = {
            "request": [c.requests for c in counted],
            "page": [c.pages for c in counted],
            "token": [c.tokens for c in counted],
        }
        return {
            name: (sum(hits for hits, _ in column), sum(asked for _, asked in column))
            for name, column in columns.items()
        }

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.stages is not None:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - started

    def _append(self, state: LayerState, keys: Tensor, values: Tensor, total: int) -> None:
        new = slice(state.length, total)
        positions = torch.arange(state.length, total, device=keys.device)
        state.policy.append(state.index, keys[:, new], values[:, new], positions)

    def _look_up(self, state: LayerState, selection: Selection) -> None:
        """Pass the step's blocks through each kv head's cache and note what happened."""
        if not state.caches:
            return
        for head, cache in enumerate(state.caches):
            step = unit_accesses(selection, head, state.prompt_length)
            columns = [np.asarray(c).tolist() for c in (step.blocks, step.pages, step.tokens)]
            state.hits[head].append(cache.access(*columns))
            cache.update()
            state.accesses[head].append(step)
        resident = (selection.positions[..., : selection.resident] >= 0).sum(-1)
        steady = -(-resident // PAGE_TOKENS)
        state.steady_pages = max(state.steady_pages, int(steady.sum()))
        state.retrieved_pages = max(state.retrieved_pages, int((selection.pages() - steady).sum()))
