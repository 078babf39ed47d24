"""Each compiled replay against its slow reference, access by access."""

from __future__ import annotations

import numpy as np
import pytest
from access_logs import random_unit, steps_of, unit_of, units
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_caches import most_page_hits, slow_belady, slow_lru, slow_wave

from kvtune.caching import UnitAccesses, get_cache
from kvtune.caching.wave_buffer import WaveBuffer

SLOW = {"lru": slow_lru, "wave": slow_wave, "belady": slow_belady}
every_cache = pytest.mark.parametrize("name", sorted(SLOW))


@every_cache
@given(accesses=units(), capacity=st.integers(0, 30))
@settings(max_examples=150, deadline=None)
def test_equals_the_reference(name: str, accesses: UnitAccesses, capacity: int):
    assert get_cache(name).page_hits(accesses, capacity).tolist() == SLOW[name](steps_of(accesses), capacity)


@every_cache
@pytest.mark.parametrize("capacity", [7, 30, 90])
def test_equals_the_reference_on_a_longer_log(name: str, capacity: int):
    accesses = random_unit(capacity, steps=40)
    expected = SLOW[name](steps_of(accesses), capacity)
    assert get_cache(name).page_hits(accesses, capacity).tolist() == expected
    assert any(expected) and not all(expected)


@given(
    steps=st.lists(st.lists(st.integers(0, 5), unique=True, max_size=3), max_size=6),
    capacity=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_belady_is_optimal(steps: list[list[int]], capacity: int):
    written = [[(block, 1 + block % 2, 8) for block in step] for step in steps]
    hits = get_cache("belady").page_hits(unit_of(written), capacity).sum()
    assert hits == most_page_hits(written, capacity)


class TestWaveOrder:
    """The update order by hand: capacity, steps of (block, pages) and the expected block hits."""

    def hits(self, capacity: int, *steps: list[tuple[int, int]]) -> list[list[bool]]:
        accesses = unit_of([[(block, pages, 8 * pages) for block, pages in step] for step in steps])
        wave = WaveBuffer()
        flat = wave.replay_blocks(wave.prepare(accesses), capacity)
        return [part.tolist() for part in np.split(flat, accesses.offsets[1:-1])]

    def test_lowest_ranked_miss_is_most_recent(self):
        # After step 0 the order is 3, 2, 1: one new page pushes out block 1, the best ranked.
        steps = [[(1, 1), (2, 1), (3, 1)], [(4, 1)], [(3, 1), (2, 1), (1, 1)]]
        assert self.hits(3, *steps)[-1] == [True, True, False]

    def test_best_ranked_hit_is_most_recent(self):
        # Step 1 promotes 2, then 1: the tail is 3, then 2.
        steps = [[(1, 1), (2, 1), (3, 1)], [(1, 1), (2, 1)], [(4, 1), (5, 1)], [(1, 1), (2, 1), (3, 1)]]
        assert self.hits(3, *steps)[-1] == [True, False, False]

    def test_admission_stops_at_the_first_that_does_not_fit(self):
        # 2 + 2 > 3 stops; block 3 would fit but ranks behind.
        steps = [[(1, 2), (2, 2), (3, 1)], [(1, 2), (2, 2), (3, 1)]]
        assert self.hits(3, *steps)[-1] == [True, False, False]

    def test_a_block_beyond_the_capacity_blocks_all_misses(self):
        steps = [[(1, 9), (2, 1)], [(2, 1)]]
        assert self.hits(4, *steps)[-1] == [False]

    def test_nothing_is_evicted_when_nothing_is_admitted(self):
        steps = [[(1, 2), (2, 2)], [(3, 5)], [(1, 2), (2, 2)]]
        assert self.hits(4, *steps)[-1] == [True, True]

    def test_a_hit_of_this_step_may_be_evicted_by_its_misses(self):
        steps = [[(1, 2)], [(1, 2), (2, 3)], [(1, 2), (2, 3)]]
        assert self.hits(4, *steps) == [[False], [True, False], [False, True]]

    def test_a_grown_block_misses_whole(self):
        steps = [[(1, 1)], [(1, 2)], [(1, 2)], [(1, 1)]]
        assert self.hits(4, *steps) == [[False], [False], [True], [True]]
