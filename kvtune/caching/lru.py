"""Plain LRU over pages: all capacities from one pass of stack distances."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvtune.caching.access_log import UnitAccesses
from kvtune.caching.base import Cache
from kvtune.caching.pages import dense_ids, page_sequence
from kvtune.caching.stack_distance import NEVER, stack_distances
from kvtune.caching.tally import PAGE, REQUEST, TOKEN, WARM_UP_STEPS, Tally, count_accesses, tokens_of_page


class PlainLRU(Cache):
    """Least recently used, page by page and updated at every access (not RetroInfer's order).

    Pages are of one size, so LRU is a stack algorithm (Mattson et al. 1970): what hits at one capacity
    hits at every larger one.
    """

    name = "lru"
    title = "plain LRU"
    source = "Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970"

    def prepare(self, accesses: UnitAccesses) -> NDArray[np.int64]:
        return stack_distances(*page_sequence(accesses))

    def replay(self, prepared: NDArray[np.int64], capacity: int) -> NDArray[np.bool_]:
        return (prepared != NEVER) & (prepared <= capacity)

    def tally(self, accesses: UnitAccesses, capacities: Sequence[int], warm_up: int = WARM_UP_STEPS) -> Tally:
        distances = self.prepare(accesses)
        order = np.argsort(np.asarray(capacities, np.int64), kind="stable")
        deepest = int(distances.max()) if len(distances) else 0
        smallest = _smallest_capacity(np.asarray(capacities, np.int64)[order], deepest)
        start = int(accesses.offsets[min(warm_up, accesses.steps)])
        first_hits = _bucket(accesses.pages, accesses.tokens, distances, smallest, start)
        hits = np.empty((len(order), 2, 3), np.int64)
        hits[order] = np.cumsum(first_hits[:-1], axis=0)
        return Tally(hits, count_accesses(accesses, warm_up))


def lru_hits(ids: NDArray[np.int64], capacities: Sequence[int]) -> NDArray[np.int64]:
    """Hits of an LRU cache over unit-size objects at each capacity, [C] int64, in one pass.

    ``ids`` [n] int64 are any non-negative object ids in order of access.
    """
    dense, n_ids = dense_ids(np.asarray(ids, np.int64))
    counts = np.bincount(stack_distances(dense, n_ids), minlength=n_ids + 1)
    counts[NEVER] = 0
    return np.cumsum(counts)[np.clip(np.asarray(capacities, np.int64), 0, n_ids)]


def _smallest_capacity(capacities: NDArray[np.int64], deepest: int) -> NDArray[np.int64]:
    """For each distance 0…deepest the index of the smallest ascending capacity that hits it (C: none)."""
    smallest = np.searchsorted(capacities, np.arange(deepest + 1))
    smallest[NEVER] = len(capacities)
    return smallest


@njit(cache=True, nogil=True)
def _bucket(pages, tokens, distances, smallest, warm_start):
    """Hits by the smallest capacity that has them, [C + 1, 2, 3]; the last row holds the cold misses."""
    counts = np.zeros((smallest[NEVER] + 1, 2, 3), np.int64)
    at = 0
    for k in range(len(pages)):
        phases = 2 if k >= warm_start else 1
        needed = 0
        for page in range(pages[k]):
            bucket = smallest[distances[at]]
            needed = max(needed, bucket)
            held = tokens_of_page(tokens[k], page)
            for phase in range(phases):
                counts[bucket, phase, PAGE] += 1
                counts[bucket, phase, TOKEN] += held
            at += 1
        for phase in range(phases):
            counts[needed, phase, REQUEST] += 1
    return counts
