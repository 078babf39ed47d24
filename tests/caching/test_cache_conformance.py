"""What every replacement policy owes, whatever it is: runs over the whole registry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from access_logs import random_unit, unit_of, units
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.caching import UnitAccesses, caches, get_cache, request_hits
from kvtune.caching.tally import PAGE, count_accesses, count_hits
from kvtune.errors import InputError

NAMES = sorted(caches())
every_cache = pytest.mark.parametrize("name", NAMES)
capacities = st.integers(0, 30)


def page_rows(accesses: UnitAccesses) -> list[tuple[int, tuple[int, int]]]:
    """Step and (block, page) of every page access."""
    steps = np.repeat(np.arange(accesses.steps), np.diff(accesses.offsets)).tolist()
    rows = zip(steps, accesses.blocks.tolist(), accesses.pages.tolist())
    return [(step, (block, page)) for step, block, pages in rows for page in range(pages)]


def held_between_steps(accesses: UnitAccesses, hits: np.ndarray) -> np.ndarray:
    """Pages that must have been in the cache before each step: those that hit later, read before."""
    held = np.zeros(accesses.steps, np.int64)
    read_at: dict[tuple[int, int], int] = {}
    for (step, page), hit in zip(page_rows(accesses), hits.tolist()):
        if hit:
            held[read_at[page] + 1 : step + 1] += 1
        read_at[page] = step
    return held


@every_cache
@given(accesses=units(), capacity=capacities)
@settings(max_examples=60, deadline=None)
def test_capacity_is_never_exceeded(name: str, accesses: UnitAccesses, capacity: int):
    hits = get_cache(name).page_hits(accesses, capacity)
    assert (held_between_steps(accesses, hits) <= capacity).all()


@every_cache
@given(accesses=units(), capacity=capacities)
@settings(max_examples=40, deadline=None)
def test_a_first_access_never_hits(name: str, accesses: UnitAccesses, capacity: int):
    hits = get_cache(name).page_hits(accesses, capacity)
    seen = set()
    for (_, page), hit in zip(page_rows(accesses), hits.tolist()):
        assert not (hit and page not in seen)
        seen.add(page)


@every_cache
@given(accesses=units(), chosen=st.lists(capacities, max_size=5), warm_up=st.integers(0, 16))
@settings(max_examples=60, deadline=None)
def test_tally_counts_the_mask(name: str, accesses: UnitAccesses, chosen: list[int], warm_up: int):
    cache = get_cache(name)
    tally = cache.tally(accesses, chosen, warm_up)
    assert tally.hits.shape == (len(chosen), 2, 3)
    assert (tally.hits <= tally.accesses).all()
    assert np.array_equal(tally.accesses, count_accesses(accesses, warm_up))
    for index, capacity in enumerate(chosen):
        mask = cache.page_hits(accesses, capacity)
        assert np.array_equal(tally.hits[index], count_hits(accesses, mask, warm_up))
        requests = request_hits(accesses, mask)
        start = accesses.offsets[min(warm_up, accesses.steps)]
        assert tally.hits[index, :, 0].tolist() == [requests.sum(), requests[start:].sum()]


@every_cache
@given(accesses=units(grow=False))
@settings(max_examples=40, deadline=None)
def test_room_for_everything_leaves_cold_misses(name: str, accesses: UnitAccesses):
    rows = [page for _, page in page_rows(accesses)]
    hits = get_cache(name).page_hits(accesses, len(set(rows)))
    assert len(rows) - hits.sum() == len(set(rows))


@every_cache
def test_no_room_hits_nothing(name: str):
    assert not get_cache(name).page_hits(random_unit(0), 0).any()


@every_cache
@pytest.mark.parametrize("steps", [0, 5])
def test_empty_log(name: str, steps: int):
    accesses = unit_of([[] for _ in range(steps)])
    cache = get_cache(name)
    assert cache.page_hits(accesses, 4).shape == (0,)
    tally = cache.tally(accesses, [0, 4])
    assert tally.hits.shape == (2, 2, 3) and not tally.hits.any() and not tally.accesses.any()
    assert np.isnan(tally.ratio(1).page)


@every_cache
def test_twice_in_a_step_is_refused(name: str):
    accesses = unit_of([[(1, 1, 8)], [(4, 1, 8), (1, 2, 9), (4, 1, 8)]])
    with pytest.raises(InputError, match="twice at step 1"):
        get_cache(name).page_hits(accesses, 4)


@every_cache
def test_ids_may_be_huge(name: str):
    accesses = random_unit(3)
    far = replace(accesses, blocks=accesses.blocks * 2**40 + 5)
    cache = get_cache(name)
    assert np.array_equal(cache.page_hits(far, 40), cache.page_hits(accesses, 40))


@pytest.mark.parametrize("name", ["lru", "belady"])
@given(accesses=units(), capacity=capacities)
@settings(max_examples=60, deadline=None)
def test_more_room_keeps_every_hit(name: str, accesses: UnitAccesses, capacity: int):
    cache = get_cache(name)
    assert (cache.page_hits(accesses, capacity) <= cache.page_hits(accesses, capacity + 1)).all()


@every_cache
@given(accesses=units(), capacity=capacities)
@settings(max_examples=60, deadline=None)
def test_belady_is_the_ceiling(name: str, accesses: UnitAccesses, capacity: int):
    ceiling = get_cache("belady").page_hits(accesses, capacity).sum()
    assert get_cache(name).page_hits(accesses, capacity).sum() <= ceiling


@every_cache
def test_ceiling_holds_on_longer_logs(name: str):
    for seed in range(3):
        accesses = random_unit(seed)
        sizes = [4, 16, 50, 120]
        ceiling = get_cache("belady").tally(accesses, sizes).hits[:, 0, PAGE]
        hits = get_cache(name).tally(accesses, sizes).hits[:, 0, PAGE]
        assert (hits <= ceiling).all() and hits[-1] > 0
