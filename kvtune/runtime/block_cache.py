"""The live block cache of one unit: RetroInfer's wave buffer, counting what it does.

Written apart from the simulator on purpose: a live run's counters and the simulator's replay of its log
must agree, and they can only vouch for each other while they share no code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtune.errors import InputError

if TYPE_CHECKING:
    from kvtune.caching import UnitAccesses


@dataclass
class Counters:
    """Requests, pages and tokens asked for, and those found in the cache."""

    requests: list[int] = field(default_factory=lambda: [0, 0])
    pages: list[int] = field(default_factory=lambda: [0, 0])
    tokens: list[int] = field(default_factory=lambda: [0, 0])

    def count(self, hit: bool, pages: int, tokens: int) -> None:
        """Note one block: ``[hits, asked]`` in each unit."""
        for counter, amount in ((self.requests, 1), (self.pages, pages), (self.tokens, tokens)):
            counter[0] += amount if hit else 0
            counter[1] += amount


class BlockCache:
    """One (layer, sequence, kv head): logical unit a block, physical unit a page of 8 tokens.

    A step calls :meth:`access` once, then :meth:`update` before the layer's next step.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InputError(f"a block cache needs at least one page, not {capacity}")
        self.capacity = capacity
        self.used = 0
        self.counters = Counters()
        self._pages: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._hits: list[int] = []
        self._misses: list[tuple[int, int]] = []

    def access(self, blocks: Sequence[int], pages: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Look blocks up in rank order, against the state before the step; returns which are present."""
        found = [block in self._pages for block in blocks]
        self._hits = [block for block, hit in zip(blocks, found) if hit]
        self._misses = [(b, p) for b, p, hit in zip(blocks, pages, found) if not hit]
        for hit, page_count, token_count in zip(found, pages, tokens):
            self.counters.count(hit, page_count, token_count)
        return found

    def update(self) -> None:
        """Promote hits in reverse rank order, admit misses in rank order, evict from the old end."""
        for block in reversed(self._hits):
            self._pages.move_to_end(block)
        admitted, needed = [], 0
        for block, pages in self._misses:
            if needed + pages > self.capacity:
                break
            admitted.append((block, pages))
            needed += pages
        while admitted and self.used + needed > self.capacity:
            self.used -= self._pages.popitem(last=False)[1]
        for block, pages in admitted:
            self._pages[block] = pages
        self.used += needed
        self._hits, self._misses = [], []


def count_only(accesses: UnitAccesses, capacity: int) -> tuple[list[bool], Counters]:
    """Pass the accesses of a unit through a block cache that moves no data: hits, and its counters."""
    cache, hits = BlockCache(capacity), []
    columns = [column.tolist() for column in (accesses.blocks, accesses.pages, accesses.tokens)]
    for first, stop in zip(accesses.offsets.tolist(), accesses.offsets.tolist()[1:]):
        hits += cache.access(*(column[first:stop] for column in columns))
        cache.update()
    return hits, cache.counters
