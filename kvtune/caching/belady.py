"""The ceiling: page-granular Belady with bypass, which no replacement policy can beat in page hits."""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvtune.caching.access_log import UnitAccesses
from kvtune.caching.base import Cache
from kvtune.caching.pages import page_sequence


class Belady(Cache):
    """Optimal offline replacement (Belady 1966) for page hits, with bypass and step by step.

    The pages of a step hit or miss against the state before the step; after it, any of the pages held or
    just read may stay. Kept are those read again soonest. As misses wait in the execution buffer until
    the step is over (like the wave buffer's), this bounds both the wave buffer and plain LRU; a policy
    that updates within the step could do no better, as a step reads a page once.
    """

    name = "belady"
    title = "Belady with bypass (ceiling for page hits)"
    source = "Belady, A study of replacement algorithms, IBM Systems Journal 5(2), 1966"

    def prepare(self, accesses: UnitAccesses) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Step offsets into the page accesses, and of each the next access to the same page."""
        pages_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(accesses.pages)])
        return pages_before[accesses.offsets], _next_access(*page_sequence(accesses))

    def replay(
        self, prepared: tuple[NDArray[np.int64], NDArray[np.int64]], capacity: int
    ) -> NDArray[np.bool_]:
        return _replay(*prepared, capacity)


@njit(cache=True, nogil=True)
def _next_access(sequence, n_pages):
    """Index of the next access to the same page, [n] int64; n where there is none."""
    n = len(sequence)
    following = np.empty(n, np.int64)
    seen_at = np.full(n_pages, n, np.int64)
    for k in range(n - 1, -1, -1):
        following[k] = seen_at[sequence[k]]
        seen_at[sequence[k]] = k
    return following


@njit(cache=True, nogil=True)
def _replay(offsets, following, capacity):
    """A page held is known by its next access: ``hits`` there, and its negative in a heap (last first).

    Entries of past accesses stay in the heap; being the soonest, they never reach its top while the
    cache is over-full.
    """
    n = len(following)
    hits = np.zeros(n, np.bool_)
    heap = [np.int64(1) for _ in range(0)]
    held = 0
    for step in range(len(offsets) - 1):
        for k in range(offsets[step], offsets[step + 1]):
            if hits[k]:
                held -= 1
        for k in range(offsets[step], offsets[step + 1]):
            if following[k] < n:
                heapq.heappush(heap, -following[k])
                hits[following[k]] = True
                held += 1
        while held > capacity:
            hits[-heapq.heappop(heap)] = False
            held -= 1
    return hits
