"""RetroInfer's wave buffer: one LRU of clusters per unit, updated step by step in its own order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvtune.caching.access_log import UnitAccesses
from kvtune.caching.base import Cache
from kvtune.caching.pages import dense_blocks
from kvtune.caching.tally import WARM_UP_STEPS, Tally, count_accesses, count_whole_hits


class _Blocks(NamedTuple):
    """Block accesses with dense ids: step offsets [T + 1], ids [n], distinct ids, pages [n]."""

    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    n_blocks: int
    pages: NDArray[np.int64]


class WaveBuffer(Cache):
    """The block cache of RetroInfer (arXiv 2505.02922), in its exact logical order.

    Access: every cluster of a step hits or misses against the state before the step. Update, finished
    before the next step: (1) hits move to the front in reverse rank order, so the best ends up first;
    (2) misses are admitted in rank order while their pages together fit the capacity, and the first that
    doesn't fit ends the admission; (3) clusters leave from the tail until the admitted ones fit; (4) each
    admitted cluster goes to the front, so the lowest-ranked one ends as the most recent.

    Clusters are cached whole. A block that has grown since it was cached (its last page was filled while
    decoding) misses as a whole, and its old copy gives way when it is admitted again. Clusters beyond the
    execution buffer were already dropped by the selection (``UnitAccesses.truncated``).
    """

    name = "wave"
    title = "RetroInfer wave buffer"
    source = "RetroInfer, arXiv 2505.02922; microsoft/RetrievalAttention, wave_buffer_cpu.cpp"

    def prepare(self, accesses: UnitAccesses) -> _Blocks:
        return _Blocks(accesses.offsets, *dense_blocks(accesses), accesses.pages)

    def replay(self, prepared: _Blocks, capacity: int) -> NDArray[np.bool_]:
        return np.repeat(self.replay_blocks(prepared, capacity), prepared.pages)

    def replay_blocks(self, prepared: _Blocks, capacity: int) -> NDArray[np.bool_]:
        """Whether each block access hits, [n]."""
        return _replay(prepared.offsets, prepared.ids, prepared.pages, prepared.n_blocks, capacity)

    def tally(self, accesses: UnitAccesses, capacities: Sequence[int], warm_up: int = WARM_UP_STEPS) -> Tally:
        prepared = self.prepare(accesses)
        hits = np.zeros((len(capacities), 2, 3), np.int64)
        for index, capacity in enumerate(capacities):
            hits[index] = count_whole_hits(accesses, self.replay_blocks(prepared, capacity), warm_up)
        return Tally(hits, count_accesses(accesses, warm_up))


@njit(cache=True, nogil=True, inline="always")
def _unlink(older, newer, block):
    older[newer[block]] = older[block]
    newer[older[block]] = newer[block]


@njit(cache=True, nogil=True, inline="always")
def _push_front(older, newer, block):
    head = len(older) - 1
    newer[older[head]] = block
    older[block] = older[head]
    older[head] = block
    newer[block] = head


@njit(cache=True, nogil=True)
def _replay(offsets, ids, pages, n_blocks, capacity):
    """Doubly linked list with a sentinel: older[n_blocks] is the front, newer[n_blocks] the tail."""
    older = np.full(n_blocks + 1, n_blocks, np.int64)
    newer = np.full(n_blocks + 1, n_blocks, np.int64)
    held = np.zeros(n_blocks, np.int64)
    hits = np.zeros(len(ids), np.bool_)
    used = 0
    for step in range(len(offsets) - 1):
        begin, end = offsets[step], offsets[step + 1]
        for k in range(begin, end):
            hits[k] = held[ids[k]] >= pages[k]
        for k in range(end - 1, begin - 1, -1):
            if hits[k]:
                _unlink(older, newer, ids[k])
                _push_front(older, newer, ids[k])
        admitted = 0
        stop = begin
        while stop < end and (hits[stop] or admitted + pages[stop] <= capacity):
            if not hits[stop]:
                admitted += pages[stop]
                if held[ids[stop]] > 0:
                    _unlink(older, newer, ids[stop])
                    used -= held[ids[stop]]
                    held[ids[stop]] = 0
            stop += 1
        while used + admitted > capacity:
            tail = newer[n_blocks]
            _unlink(older, newer, tail)
            used -= held[tail]
            held[tail] = 0
        for k in range(begin, stop):
            if not hits[k]:
                _push_front(older, newer, ids[k])
                held[ids[k]] = pages[k]
        used += admitted
    return hits
