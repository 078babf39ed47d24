from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_caches import slow_lru

from kvtune.caching.lru import lru_hits
from kvtune.caching.pages import dense_ids
from kvtune.caching.stack_distance import NEVER, stack_distances


def slow_distances(ids: list[int], offsets: list[int] | None = None) -> list[int]:
    """Position (from 1) in a list of ids, most recent first; a batch looks before it touches."""
    stack: list[int] = []
    distances = []
    offsets = offsets or list(range(len(ids) + 1))
    for begin, end in pairwise(offsets):
        distances += [stack.index(x) + 1 if x in stack else NEVER for x in ids[begin:end]]
        for x in ids[begin:end]:
            stack = [x, *(other for other in stack if other != x)]
    return distances


@given(st.lists(st.integers(0, 12), max_size=80))
@settings(max_examples=150, deadline=None)
def test_equals_positions_in_a_list(ids: list[int]):
    assert stack_distances(np.array(ids, np.int64), 13).tolist() == slow_distances(ids)


@given(st.lists(st.lists(st.integers(0, 12), max_size=9), max_size=12))
@settings(max_examples=150, deadline=None)
def test_batches_are_judged_before_they_are_touched(batches: list[list[int]]):
    ids = [x for batch in batches for x in batch]
    offsets = np.cumsum([0, *map(len, batches)])
    found = stack_distances(np.array(ids, np.int64), 13, offsets)
    assert found.tolist() == slow_distances(ids, offsets.tolist())


@pytest.mark.parametrize(("n_ids", "batch"), [(1, 1), (40, 1), (300, 1), (40, 7), (300, 64)])
def test_the_time_axis_is_compacted_many_times(n_ids: int, batch: int):
    # 6,000 accesses on an axis of at most 2,048 slots.
    rng = np.random.default_rng(n_ids)
    ids = np.minimum(rng.geometric(min(1, 3 / n_ids), 6000) - 1, n_ids - 1).astype(np.int64)
    offsets = np.append(np.arange(0, 6000, batch), 6000)
    expected = slow_distances(ids.tolist(), offsets.tolist())
    assert stack_distances(ids, n_ids, offsets).tolist() == expected
    if batch == 1:
        assert stack_distances(ids, n_ids).tolist() == expected


@given(st.lists(st.integers(0, 30), max_size=60), st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=60, deadline=None)
def test_hits_at_all_sizes_equal_one_run_a_size(ids: list[int], sizes: list[int]):
    one_by_one = [sum(slow_lru([[(x, 1, 8)] for x in ids], size)) for size in sizes]
    assert lru_hits(np.array(ids, np.int64), sizes).tolist() == one_by_one


@given(st.lists(st.integers(0, 2**62), max_size=40), st.booleans())
@settings(deadline=None)
def test_dense_ids_keep_equality(ids: list[int], small: bool):
    given_ids = [x % 50 for x in ids] if small else ids
    dense, count = dense_ids(np.array(given_ids, np.int64))
    assert count == len(set(given_ids)) == len(set(dense.tolist()))
    assert len(set(zip(given_ids, dense.tolist()))) == count
    assert all(0 <= x < count for x in dense.tolist())
