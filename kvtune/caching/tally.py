"""Counting hits in three units (request, page, token), from an empty cache and after warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvtune.caching.access_log import UnitAccesses
from kvtune.geometry import PAGE_TOKENS

WARM_UP_STEPS = 32
"""Steps that the warm counts leave out; the cache works through them all the same."""

COLD, WARM = 0, 1
REQUEST, PAGE, TOKEN = 0, 1, 2


@dataclass(frozen=True)
class HitRatio:
    """Hits ÷ accesses by unit of counting; NaN where there was no access."""

    request: float
    page: float
    token: float

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready: ``None`` stands for NaN."""
        values = {"request": self.request, "page": self.page, "token": self.token}
        return {unit: None if math.isnan(value) else value for unit, value in values.items()}


@dataclass
class Tally:
    """Hits and accesses of one or more units at C capacities.

    hits [C, 2, 3] int64, accesses [2, 3] int64: axes are capacity, (from an empty cache, after warm-up),
    (request, page, token). Tallies of several units add up.

    A request hits when all its pages hit. A block's wanted tokens fill its pages in order, so page i
    counts ``clip(tokens - 8·i, 0, 8)`` tokens.
    """

    hits: NDArray[np.int64]
    accesses: NDArray[np.int64]

    @classmethod
    def empty(cls, capacities: int) -> Tally:
        return cls(np.zeros((capacities, 2, 3), np.int64), np.zeros((2, 3), np.int64))

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.hits + other.hits, self.accesses + other.accesses)

    def ratio(self, capacity: int, phase: int = COLD) -> HitRatio:
        """Hit ratios at the capacity of that index, from an empty cache (``COLD``) or ``WARM``."""
        hits, accesses = self.hits[capacity, phase], self.accesses[phase]
        values = [float(h / n) if n else math.nan for h, n in zip(hits, accesses)]
        return HitRatio(*values)

    def missed_pages(self, capacity: int, phase: int = COLD) -> int:
        return int(self.accesses[phase, PAGE] - self.hits[capacity, phase, PAGE])


def count_accesses(accesses: UnitAccesses, warm_up: int = WARM_UP_STEPS) -> NDArray[np.int64]:
    """Requests, pages and tokens accessed in all steps and after ``warm_up`` steps: [2, 3] int64."""
    return count_whole_hits(accesses, np.ones(len(accesses.blocks), np.bool_), warm_up)


def count_whole_hits(
    accesses: UnitAccesses, block_hits: NDArray[np.bool_], warm_up: int = WARM_UP_STEPS
) -> NDArray[np.int64]:
    """Hits where blocks hit as a whole or not at all, from their mask [n]: [2, 3] int64."""
    start = int(accesses.offsets[min(warm_up, accesses.steps)])
    columns = np.stack([np.ones_like(accesses.blocks), accesses.pages, accesses.tokens])
    return np.stack([columns[:, k:] @ block_hits[k:] for k in (0, start)])


def count_hits(
    accesses: UnitAccesses, page_hits: NDArray[np.bool_], warm_up: int = WARM_UP_STEPS
) -> NDArray[np.int64]:
    """Hits counted like :func:`count_accesses`, from the mask of page hits [sum of pages]: [2, 3] int64."""
    start = int(accesses.offsets[min(warm_up, accesses.steps)])
    return _count(accesses.pages, accesses.tokens, page_hits, start)


@njit(cache=True, nogil=True)
def tokens_of_page(tokens, page):
    """How many of a block's wanted tokens lie in its page of that number."""
    return min(max(tokens - PAGE_TOKENS * page, 0), PAGE_TOKENS)


@njit(cache=True, nogil=True)
def _count(pages, tokens, page_hits, warm_start):
    counts = np.zeros((2, 3), np.int64)
    at = 0
    for k in range(len(pages)):
        hit_pages = 0
        hit_tokens = 0
        for page in range(pages[k]):
            if page_hits[at]:
                hit_pages += 1
                hit_tokens += tokens_of_page(tokens[k], page)
            at += 1
        whole = 1 if hit_pages == pages[k] else 0
        for phase in range(2 if k >= warm_start else 1):
            counts[phase, REQUEST] += whole
            counts[phase, PAGE] += hit_pages
            counts[phase, TOKEN] += hit_tokens
    return counts
