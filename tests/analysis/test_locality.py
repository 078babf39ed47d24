from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.analysis.locality import (
    common_tokens,
    lag_pairs,
    overlap,
    query_cosine,
    set_overlap,
    top_tokens,
    working_set,
)
from kvtune.attention import eligible


def masked_scores(steps, heads, length, first, *, window=None, seed=0):
    """Random logits [T, Hq, N] of decode steps at positions first, first + 1, …"""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(first, first + steps)
    scores = torch.randn(steps, heads, length, generator=generator)
    visible = eligible(positions, torch.arange(length), window)
    return scores.masked_fill(~visible[:, None], -math.inf), positions


def slow_overlap(scores, positions, pairs, k, window):
    """Rank both steps over the keys that both may see, one head at a time."""
    shares = []
    for a, b in zip(pairs[0].tolist(), pairs[1].tolist()):
        last = int(positions[a])
        first = 0 if window is None else max(0, int(positions[b]) - window + 1)
        row = []
        for head in range(scores.shape[1]):
            allowed = list(range(first, last + 1))
            ranked = [
                set(sorted(allowed, key=lambda n: -float(scores[step, head, n]))[:k]) for step in (a, b)
            ]
            row.append(len(ranked[0] & ranked[1]) / len(ranked[0]) if allowed else math.nan)
        shares.append(row)
    return torch.tensor(shares).reshape(-1, scores.shape[1])


@settings(deadline=None, max_examples=40)
@given(
    steps=st.integers(2, 9),
    lag=st.integers(1, 4),
    k=st.integers(1, 12),
    first=st.integers(0, 14),
    window=st.sampled_from([None, 2, 5, 40]),
    seed=st.integers(0, 9),
)
def test_overlap_equals_the_slow_reference(*, steps, lag, k, first, window, seed):
    scores, positions = masked_scores(steps, 2, first + steps, first, window=window, seed=seed)
    turns = torch.zeros(steps, dtype=torch.long)
    pairs = lag_pairs(turns, torch.arange(steps), lag)
    got = overlap(top_tokens(scores, k + lag), positions, pairs, k, window)
    expected = slow_overlap(scores, positions, pairs, k, window)
    torch.testing.assert_close(got, expected, equal_nan=True)
    measured = got[~got.isnan()]
    assert bool(((measured >= 0) & (measured <= 1)).all())


def test_equal_queries_overlap_wholly_although_new_tokens_outrank_the_old():
    scores, positions = masked_scores(4, 1, 24, 20)
    scores[:] = torch.arange(24.0)
    scores = scores.masked_fill(~eligible(positions, torch.arange(24), None)[:, None], -math.inf)
    pairs = lag_pairs(torch.zeros(4, dtype=torch.long), torch.arange(4), 2)
    assert overlap(top_tokens(scores, 7), positions, pairs, 5).tolist() == [[1.0], [1.0]]


def test_overlap_refuses_a_list_too_short_for_the_lag():
    scores, positions = masked_scores(6, 1, 30, 20)
    pairs = lag_pairs(torch.zeros(6, dtype=torch.long), torch.arange(6), 4)
    with pytest.raises(ValueError, match="too few"):
        overlap(top_tokens(scores, 12), positions, pairs, 10)


def test_pairs_stay_within_a_turn_and_skip_missing_steps():
    turns = torch.tensor([0, 0, 0, 1, 1])
    steps = torch.tensor([0, 1, 3, 0, 1])
    earlier, later = lag_pairs(turns, steps, 1)
    assert sorted(zip(earlier.tolist(), later.tolist())) == [(0, 1), (3, 4)]
    earlier, later = lag_pairs(turns, steps, 2)
    assert list(zip(earlier.tolist(), later.tolist())) == [(1, 2)]
    assert len(lag_pairs(turns, steps, 64)[0]) == 0


def test_query_cosine_is_the_textbook_cosine():
    queries = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    pairs = lag_pairs(torch.zeros(5, dtype=torch.long), torch.arange(5), 2)
    got = query_cosine(queries, pairs)
    assert got.shape == (3, 3)
    for row, (a, b) in enumerate(zip(pairs[0].tolist(), pairs[1].tolist())):
        for head in range(3):
            x, y = queries[a, head].double(), queries[b, head].double()
            assert float(got[row, head]) == pytest.approx(float(x @ y / (x.norm() * y.norm())), abs=1e-6)


@pytest.mark.parametrize("window", [None, 3, 100])
def test_common_tokens_counts_what_both_steps_see(window):
    positions = torch.arange(10, 16)
    pairs = lag_pairs(torch.zeros(6, dtype=torch.long), torch.arange(6), 4)
    visible = eligible(positions, torch.arange(16), window)
    expected = (visible[pairs[0]] & visible[pairs[1]]).sum(-1)
    assert common_tokens(positions, pairs, window).tolist() == expected.tolist()


def test_top_tokens_are_ranked_and_padded():
    scores = torch.tensor([[0.5, 2.0, -math.inf, 1.0]])
    assert top_tokens(scores, 2).tolist() == [[1, 3]]
    assert top_tokens(scores, 6).tolist() == [[1, 3, 0, -1, -1, -1]]


@given(
    st.sets(st.integers(0, 20), min_size=4, max_size=4), st.sets(st.integers(0, 20), min_size=4, max_size=4)
)
def test_set_overlap_is_symmetric_and_counts_common_members(left, right):
    a, b = torch.tensor(sorted(left)), torch.tensor(sorted(right))
    assert float(set_overlap(a, b)) == float(set_overlap(b, a)) == len(left & right) / 4


def test_padding_is_never_in_common():
    padded = torch.tensor([3, -1, -1])
    assert float(set_overlap(padded, torch.tensor([5, -1, -1]))) == 0.0
    assert math.isnan(float(set_overlap(torch.tensor([-1]), torch.tensor([-1]))))


def test_working_set_counts_distinct_tokens_of_whole_blocks_of_one_turn():
    top = torch.randint(0, 12, (11, 2, 3), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    top[0, 0, 2] = -1
    turns = torch.tensor([0] * 7 + [1] * 4)
    got, owners = working_set(top, turns, 3)
    assert owners.tolist() == [0, 0, 1]
    blocks = [[0, 1, 2], [3, 4, 5], [7, 8, 9]]
    expected = [
        [len({int(token) for row in block for token in top[row, head]} - {-1}) for head in range(2)]
        for block in blocks
    ]
    assert got.tolist() == expected
