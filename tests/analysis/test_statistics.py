from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.analysis.statistics import Distribution, bootstrap_interval, group_sums, rank_correlation

FLOATS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(FLOATS, st.integers(1, 7))
def test_a_distribution_fed_in_pieces_equals_numpy_on_the_whole(values, piece):
    distribution = Distribution()
    for start in range(0, len(values), piece):
        distribution.add(values[start : start + piece])
    assert distribution.count == len(values)
    assert distribution.mean == pytest.approx(float(np.mean(values)), abs=1e-6)
    assert (distribution.low, distribution.high) == (min(values), max(values))
    for share in (0.1, 0.5, 0.9, 0.95):
        assert distribution.quantile(share) == pytest.approx(float(np.quantile(values, share)))


def test_nan_is_left_out_and_nothing_gives_nan():
    distribution = Distribution()
    distribution.add([math.nan, 2.0, math.nan])
    assert (distribution.count, distribution.mean) == (1, 2.0)
    empty = Distribution()
    empty.add([math.nan])
    assert math.isnan(empty.mean)
    assert math.isnan(empty.quantile(0.5))


def test_beyond_the_capacity_quantiles_come_from_a_fair_repeatable_sample():
    values = np.random.default_rng(3).permutation(40_000) / 40_000
    first, second = Distribution(capacity=4000), Distribution(capacity=4000)
    for piece in np.split(values, 40):
        first.add(piece)
        second.add(piece)
    assert first.mean == pytest.approx(values.mean())
    assert first.quantile(0.9) == second.quantile(0.9)
    for share in (0.1, 0.5, 0.9):
        assert first.quantile(share) == pytest.approx(share, abs=0.03)


def slow_interval(sums, counts, draws, seed):
    """One resample at a time, from the definition."""
    random = np.random.default_rng(seed)
    means = []
    for _ in range(draws):
        chosen = random.integers(0, len(sums), len(sums))
        means.append(sum(sums[i] for i in chosen) / sum(counts[i] for i in chosen))
    return np.quantile(means, 0.025), np.quantile(means, 0.975)


def test_the_interval_equals_resampling_one_by_one():
    sums, counts = [3.0, 9.0, 2.0, 8.0, 5.0], [1.0, 4.0, 2.0, 3.0, 1.0]
    assert bootstrap_interval(sums, counts, draws=200, seed=7) == pytest.approx(
        slow_interval(sums, counts, 200, 7)
    )


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.integers(0, 5))
def test_the_interval_stays_within_the_values_and_repeats_under_a_seed(values, seed):
    low, high = bootstrap_interval(values, draws=50, seed=seed)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert (low, high) == bootstrap_interval(values, draws=50, seed=seed)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    random = np.random.default_rng(0)
    hits = 0
    for repeat in range(200):
        low, high = bootstrap_interval(random.normal(size=40), draws=300, seed=repeat)
        hits += low <= 0 <= high
    assert 0.87 <= hits / 200 <= 0.99


@pytest.mark.parametrize("sums", [[], [1.0], [1.0, math.nan]])
def test_fewer_than_two_groups_have_no_interval(sums):
    assert all(math.isnan(bound) for bound in bootstrap_interval(sums))


def test_values_gather_into_groups():
    sums, counts = group_sums([1.0, 2.0, math.nan, 4.0], [5, 9, 9, 5])
    assert sums.tolist() == [5.0, 2.0]
    assert counts.tolist() == [2.0, 1.0]


def ranked_slowly(values: list[float]) -> list[float]:
    """The mean rank of each value: those below it, and half of its equals."""
    return [sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=20))
def test_rank_correlation_is_that_of_the_ranks(pairs):
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    found = rank_correlation(first, second)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert math.isnan(found)
        return
    x, y = np.array(ranked_slowly(first)), np.array(ranked_slowly(second))
    x, y = x - x.mean(), y - y.mean()
    assert found == pytest.approx(float((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())))
    assert rank_correlation([math.exp(a) for a in first], second) == pytest.approx(found)
    assert rank_correlation([-a for a in first], second) == pytest.approx(-found)


def test_two_pairs_have_no_rank_correlation():
    assert math.isnan(rank_correlation([1, 2], [3, 4]))
