"""Padded rows, position blocks and cluster members against plain lists."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.policies.layout import (
    best_blocks,
    cluster_tokens,
    consecutive_blocks,
    position_blocks,
    span,
    steady_zone,
)


def test_span_pads_with_minus_one():
    rows = span(torch.tensor([2, 5, 4]), torch.tensor([4, 5, 7]))
    assert rows.tolist() == [[2, 3, -1], [-1, -1, -1], [4, 5, 6]]


@given(
    position=st.integers(0, 60), sink=st.integers(0, 8), tail=st.integers(-5, 70), window=st.integers(1, 80)
)
def test_steady_zone_is_sink_and_tail_inside_the_window(position, sink, tail, window):
    rows = steady_zone(torch.tensor([position]), sink, torch.tensor([tail]), window)
    got = sorted(p for p in rows[0].tolist() if p >= 0)
    wanted = {p for p in range(position + 1) if (p < sink or p >= tail) and p > position - window}
    assert got == sorted(wanted)


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), max_size=30, unique=True))
def test_position_blocks_count_pages_and_tokens(ranked):
    row = torch.tensor([[[*ranked, -1]]], dtype=torch.int64)
    blocks = position_blocks(row, 100)
    seen = list(dict.fromkeys(p // 16 for p in ranked))
    ids = [b for b in blocks.ids[0, 0].tolist() if b >= 0]
    assert ids == seen
    for column, block in enumerate(ids):
        inside = [p for p in ranked if p // 16 == block]
        assert int(blocks.tokens[0, 0, column]) == len(inside)
        assert int(blocks.pages[0, 0, column]) == 2
    assert int(blocks.touched[0, 0]) == len({p // 8 for p in ranked})


@settings(deadline=None)
@given(st.data())
def test_cluster_tokens_lists_members_in_rank_order(data):
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
    chosen = data.draw(st.lists(st.integers(-1, len(sizes) - 1), min_size=1, max_size=6))
    order = torch.arange(100, 100 + sum(sizes))[None]
    offsets = torch.tensor([[0, *torch.tensor(sizes).cumsum(0).tolist()]])
    rows = cluster_tokens(torch.tensor([[chosen]]), order, offsets)
    wanted = [t for c in chosen if c >= 0 for t in order[0, offsets[0, c] : offsets[0, c + 1]].tolist()]
    got = rows[0, 0].tolist()
    assert got[: len(wanted)] == wanted and set(got[len(wanted) :]) <= {-1}


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=10), st.integers(1, 12))
def test_best_blocks_are_the_allowed_of_highest_score(blocks, count):
    scores = torch.tensor([[[float(score) for score, _ in blocks]]])
    allowed = torch.tensor([[[usable for _, usable in blocks]]])
    wanted = sorted((b for b, (_, usable) in enumerate(blocks) if usable), key=lambda b: -blocks[b][0])
    got = best_blocks(scores, allowed, count)[0, 0].tolist()
    assert len(got) == min(count, len(blocks))
    assert [b for b in got if b >= 0] == wanted[:count]


@given(st.lists(st.integers(0, 9), max_size=6, unique=True), st.integers(1, 20), st.integers(0, 7))
def test_consecutive_blocks_list_their_tokens(chosen, size, first):
    row = torch.tensor([[[*chosen, -1]]], dtype=torch.int64)
    tokens, blocks = consecutive_blocks(row, size, first)
    wanted = [first + b * size + i for b in chosen for i in range(size)]
    assert tokens[0, 0].tolist() == wanted + [-1] * size
    assert blocks.tokens[0, 0].tolist() == [size] * len(chosen) + [0]
    assert blocks.pages[0, 0].tolist() == [-(-size // 8)] * len(chosen) + [0]
    assert int(blocks.touched[0, 0]) == len(chosen) * -(-size // 8)
