"""The live block cache against a list-based retelling of RetroInfer's update order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import InputError
from kvtune.runtime.block_cache import BlockCache

SIZES = {block: 1 + block % 3 for block in range(12)}


def retold(steps, capacity):
    """Most recent first; every rule spelled out."""
    order: list[int] = []
    outcome = []
    for blocks in steps:
        hits = [b for b in blocks if b in order]
        misses = [b for b in blocks if b not in order]
        outcome.append([b in hits for b in blocks])
        for block in reversed(hits):
            order.remove(block)
            order.insert(0, block)
        admitted = []
        for block in misses:
            if sum(SIZES[b] for b in [*admitted, block]) > capacity:
                break
            admitted.append(block)
        while admitted and sum(SIZES[b] for b in [*order, *admitted]) > capacity:
            order.pop()
        for block in admitted:
            order.insert(0, block)
    return outcome, order


@settings(deadline=None)
@given(
    steps=st.lists(st.lists(st.integers(0, 11), max_size=6, unique=True), max_size=20),
    capacity=st.integers(1, 25),
)
def test_hits_and_order_follow_the_rules(steps, capacity):
    cache = BlockCache(capacity)
    outcome = []
    for blocks in steps:
        outcome.append(cache.access(blocks, [SIZES[b] for b in blocks], [8 * SIZES[b] for b in blocks]))
        cache.update()
        assert cache.used == sum(SIZES[b] for b in cache._pages) <= capacity
    expected, order = retold(steps, capacity)
    assert outcome == expected
    assert list(reversed(cache._pages)) == order
    assert cache.counters.requests == [sum(map(sum, expected)), sum(map(len, expected))]


def test_capacity_must_hold_a_page():
    with pytest.raises(InputError):
        BlockCache(0)
