from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from access_logs import random_unit, steps_of, unit_of, units
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtune
from kvtune.caching import (
    AccessLog,
    UnitAccesses,
    caches,
    capacity_pages,
    get_cache,
    request_hits,
    simulate,
)
from kvtune.errors import InputError

PAGE_BYTES = 2048


def log_of(*accesses: UnitAccesses) -> AccessLog:
    """One sample, one timeline, a layer each."""
    return AccessLog(PAGE_BYTES, {(0, 0, layer, 0): unit for layer, unit in enumerate(accesses)})


@pytest.mark.parametrize(
    ("fraction", "context", "pages"),
    [(0.05, 131072, 819), (1.0, 4096, 512), (0.001, 100, 1), (0.5, 0, 1), (0.25, 80, 2), (0.35, 80, 4)],
)
def test_capacity_rounds_to_pages_but_not_to_none(fraction: float, context: int, pages: int):
    assert capacity_pages(fraction, context) == pages


def test_ratios_and_traffic_by_hand():
    # 64 context tokens, half of them: 4 slots. Step 1 hits block 1 (2 pages, 11 tokens), misses block 3.
    steps = [[(1, 2, 11), (2, 1, 8)], [(1, 2, 11), (3, 1, 5)]]
    (result,) = simulate(log_of(unit_of(steps, 64, [0, 2])), [0.5], "wave", warm_up=1)
    assert result.page_slots == 4
    assert result.hit_ratio.to_dict() == {"request": 1 / 4, "page": 2 / 6, "token": 11 / 35}
    assert result.warm_hit_ratio.to_dict() == {"request": 1 / 2, "page": 2 / 3, "token": 11 / 16}
    assert result.transfer_bytes_per_step == 4 * PAGE_BYTES / 2
    assert result.warm_transfer_bytes_per_step == 1 * PAGE_BYTES / 1
    assert result.partial_page_waste == pytest.approx(1 - 35 / 48)
    assert result.truncations == 2


def test_a_step_passes_all_layers_of_one_timeline():
    steps = [[(1, 3, 24)], [(2, 3, 24)]]
    unit = unit_of(steps, 80)
    one = simulate(AccessLog(PAGE_BYTES, {(0, 0, 0, 0): unit}), [1.0])[0]
    layers_and_heads = {(0, 0, layer, head): unit for layer in range(2) for head in range(2)}
    assert one.transfer_bytes_per_step == 3 * PAGE_BYTES
    many = simulate(AccessLog(PAGE_BYTES, layers_and_heads), [1.0])[0]
    assert many.transfer_bytes_per_step == 4 * one.transfer_bytes_per_step
    timelines = {(sample, timeline, 0, 0): unit for sample in range(2) for timeline in range(2)}
    again = simulate(AccessLog(PAGE_BYTES, timelines), [1.0])[0]
    assert again.transfer_bytes_per_step == one.transfer_bytes_per_step
    assert again.steps == (8, 0)


@pytest.mark.parametrize("name", sorted(caches()))
def test_units_add_up_and_masks_agree(name: str):
    log = log_of(random_unit(1), random_unit(2, steps=35), unit_of([[], []]))
    budgets = [0.5, 0.05, 0.2]
    for result, budget in zip(simulate(log, budgets, name, keep_hits=True), budgets):
        assert result.budget == budget
        hits = sum(unit.tally.hits for unit in result.units.values())
        assert np.array_equal(hits, result.tally.hits) and result.tally.hits[0, 0].min() > 0
        asking = [result.units[unit] for unit, accesses in log if len(accesses.blocks)]
        assert result.page_slots == sum(unit.capacity for unit in asking)
        assert result.asking_units == len(asking) == 2
        for unit, accesses in log:
            replayed = result.units[unit]
            assert replayed.capacity == capacity_pages(budget, accesses.context_tokens)
            expected = get_cache(name).page_hits(accesses, replayed.capacity)
            assert replayed.page_hits is not None and np.array_equal(replayed.page_hits, expected)
            assert replayed.tally.hits[0, 0, 0] == request_hits(accesses, expected).sum()


def test_warm_up_leaves_out_32_steps():
    accesses = random_unit(4, steps=50)
    (result,) = simulate(log_of(accesses), [0.2], "wave", keep_hits=True)
    mask = result.units[0, 0, 0, 0].page_hits
    assert mask is not None
    late = sum(pages for step in steps_of(accesses)[:32] for _, pages, _ in step)
    assert result.warm_hit_ratio.page == mask[late:].mean()
    assert result.hit_ratio.page == mask.mean() < result.warm_hit_ratio.page
    assert result.steps == (50, 18)


def test_nothing_accessed_is_no_ratio():
    (result,) = simulate(log_of(unit_of([[], [], []])), [0.1])
    assert math.isnan(result.hit_ratio.page) and result.transfer_bytes_per_step == 0
    assert result.page_slots == 0 and result.asking_units == 0
    row = result.to_dict()
    assert row["hit_ratio"] == {"request": None, "page": None, "token": None}
    assert row["warm_transfer_bytes_per_step"] is None and row["partial_page_waste"] is None


@given(accesses=units(), budgets=st.lists(st.floats(0.001, 1), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_plain_lru_grows_with_the_budget(accesses: UnitAccesses, budgets: list[float]):
    curve = simulate(log_of(accesses), sorted(budgets), "lru")
    hits = np.stack([result.tally.hits[0] for result in curve])
    assert (np.diff(hits, axis=0) >= 0).all()


def test_layers_of_a_log():
    log = log_of(random_unit(1), random_unit(2))
    (result,) = simulate(log, [0.1], layers=[1])
    assert set(result.units) == {(0, 0, 1, 0)}
    with pytest.raises(InputError, match="no layer 7") as caught:
        simulate(log, [0.1], layers=[1, 7])
    assert caught.value.hint == "it has: 0, 1"


@pytest.mark.parametrize("budget", [0, -0.1, 1.01, math.nan, math.inf])
def test_budgets_outside_are_refused(budget: float):
    with pytest.raises(InputError, match=r"outside \(0, 1\]"):
        simulate(log_of(random_unit(1)), [0.1, budget])


def test_other_bad_input_is_refused():
    log = log_of(random_unit(1))
    with pytest.raises(InputError, match="no cache budget"):
        simulate(log, [])
    with pytest.raises(InputError, match="unknown cache 'wav'") as caught:
        simulate(log, [0.1], "wav")
    assert caught.value.hint == "did you mean 'wave'?"
    with pytest.raises(InputError, match="no units"):
        simulate(AccessLog(PAGE_BYTES), [0.1])
    with pytest.raises(InputError, match="must not be negative"):
        simulate(log, [0.1], warm_up=-1)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([[(-1, 1, 8)]], "block ids"),
        ([[(1, 0, 0)]], "at least one page"),
        ([[(1, 1, 9)]], "more tokens than its pages"),
        ([[(1, 1, -1)]], "more tokens than its pages"),
        ([[(1, 1, 8), (1, 1, 8)]], "twice at step 0"),
    ],
)
def test_a_log_that_makes_no_sense_is_refused(steps: list, message: str):
    with pytest.raises(InputError, match=message):
        simulate(log_of(unit_of([[(5, 1, 8)]]), unit_of(steps)), [0.1])


def test_offsets_must_match():
    unit = unit_of([[(1, 1, 8)], [(2, 1, 8)]])
    unit.offsets = np.array([0, 2, 1])
    with pytest.raises(InputError, match="sample 0, timeline 0, layer 0, kv head 0: step offsets"):
        simulate(log_of(unit), [0.1])


def test_from_a_trace(drifting_trace: Path):
    budgets = [0.02, 0.1]
    wave = kvtune.simulate(drifting_trace, budgets, settings={"retrieval": 0.05})
    assert set(wave[0].units) == {(s, 0, layer, head) for s in (0, 1) for layer in (0, 2) for head in (0, 1)}
    assert wave[0].steps == (80, 16)
    ceiling = kvtune.simulate(drifting_trace, budgets, "belady", settings={"retrieval": 0.05})
    for result, best in zip(wave, ceiling):
        assert 0 < result.hit_ratio.page <= best.hit_ratio.page < 1
    trace = kvtune.open_trace(drifting_trace)
    (one,) = kvtune.simulate(trace, [0.1], settings={"retrieval": 0.05}, layers=[2])
    assert {layer for _, _, layer, _ in one.units} == {2}
    with pytest.raises(InputError, match="the trace has no layer 1"):
        kvtune.simulate(trace, [0.1], layers=[1])
