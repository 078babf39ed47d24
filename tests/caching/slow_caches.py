"""Slow, obvious references: one line of thought each, no compiled code, no shared helpers."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations

from access_logs import Step


def pages_of(step: Step) -> list[tuple[int, int]]:
    return [(block, page) for block, pages, _ in step for page in range(pages)]


def slow_lru(steps: list[Step], capacity: int) -> list[bool]:
    """Page by page, least recently used out."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = []
    for step in steps:
        for page in pages_of(step):
            hits.append(page in cache)
            cache[page] = None
            cache.move_to_end(page)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def slow_wave(steps: list[Step], capacity: int) -> list[bool]:
    """The wave buffer as a list of blocks, front first; hits are repeated for each page of a block."""
    order: list[int] = []
    held: dict[int, int] = {}
    hits = []
    for step in steps:
        hit = [(block, pages) for block, pages, _ in step if held.get(block, 0) >= pages]
        missed = [(block, pages) for block, pages, _ in step if held.get(block, 0) < pages]
        for block, pages, _ in step:
            hits += [(block, pages) in hit] * pages
        for block, _ in reversed(hit):
            order.remove(block)
            order.insert(0, block)
        admitted, needed = [], 0
        for block, pages in missed:
            if needed + pages > capacity:
                break
            admitted.append((block, pages))
            needed += pages
        for block, _ in admitted:
            if block in held:
                order.remove(block)
                del held[block]
        while sum(held.values()) + needed > capacity:
            del held[order.pop()]
        for block, pages in admitted:
            order.insert(0, block)
            held[block] = pages
        assert sorted(order) == sorted(held)
        assert sum(held.values()) <= capacity
    return hits


def slow_belady(steps: list[Step], capacity: int) -> list[bool]:
    """After each step keep the pages read again soonest, ties by order of access."""
    flat = [pages_of(step) for step in steps]
    hits: list[bool] = []
    cache: set[tuple[int, int]] = set()
    for number, step in enumerate(flat):
        hits += [page in cache for page in step]

        def next_read(page: tuple[int, int], after: int = number) -> tuple[int, int] | None:
            for later in range(after + 1, len(flat)):
                if page in flat[later]:
                    return later, flat[later].index(page)
            return None

        again = {page: next_read(page) for page in cache | set(step)}
        wanted = sorted((when, page) for page, when in again.items() if when is not None)
        cache = {page for _, page in wanted[:capacity]}
    return hits


def most_page_hits(steps: list[Step], capacity: int) -> int:
    """The best that any policy can do, by trying every choice of what to keep after every step."""
    states: dict[frozenset[tuple[int, int]], int] = {frozenset(): 0}
    for step in steps:
        pages = pages_of(step)
        following: dict[frozenset[tuple[int, int]], int] = {}
        for state, hits in states.items():
            reached = hits + sum(page in state for page in pages)
            available = state | set(pages)
            for kept in combinations(sorted(available), min(capacity, len(available))):
                key = frozenset(kept)
                following[key] = max(following.get(key, 0), reached)
        states = following
    return max(states.values())
