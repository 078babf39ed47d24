"""Filling a budget, against the slow search over every length."""

from __future__ import annotations

import math
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from kvtune.workloads.fitting import SLACK_TOKENS, largest_fitting


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(0, 20), st.integers(0, 400))
def test_fills_the_budget_as_the_slow_search_does(units: list[int], fixed: int, budget: int) -> None:
    counts = list(accumulate(units, initial=fixed))
    fitting = [k for k, tokens in enumerate(counts) if tokens <= budget]
    k = largest_fitting(counts.__getitem__, budget, len(units))
    if not fitting:
        assert k is None
    else:
        assert k is not None
        assert counts[k] <= budget
        assert k == fitting[-1] or budget - counts[k] <= SLACK_TOKENS


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5000), st.floats(0, 1))
def test_counts_a_bounded_number_of_times(units: list[int], share: float) -> None:
    counts = list(accumulate(units, initial=0))
    calls = 0

    def count(k: int) -> int:
        nonlocal calls
        calls += 1
        return counts[k]

    largest_fitting(count, int(share * counts[-1]), len(units))
    assert calls <= 3 * math.ceil(math.log2(len(units) + 1)) + 5


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=80), st.integers(0, 100))
def test_never_exceeds_the_budget_where_counts_bend(steps: list[int], budget: int) -> None:
    counts = list(accumulate(steps, initial=0))
    k = largest_fitting(counts.__getitem__, budget, len(steps))
    assert k is not None
    assert counts[k] <= budget
