"""Pinned spans and periodic full steps of the wave index."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_inputs import HEADS, LAYER, NONE, built, queries, tensors

from kvtune.attention import exact_attention, sparse_attention
from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.retroinfer import UPDATE_TOKENS
from kvtune.policies.spans import parse_spans, span_positions


def attended(selection, step, head, columns=slice(None)):
    return sorted(p for p in selection.positions[step, head, columns].tolist() if p >= 0)


@pytest.mark.parametrize(
    ("text", "spans"),
    [("", ()), (" 7 ", ((7, 8),)), ("250-300, 0-100", ((0, 101), (250, 301))), ("0-5,6-8,3-4", ((0, 9),))],
)
def test_spans_are_sorted_and_joined(text, spans):
    assert parse_spans(text) == spans


@pytest.mark.parametrize("text", ["5-2", "a", "1-", "-3", "1-2-3", "1,,2", "1.5"])
def test_bad_spans_are_refused(text):
    with pytest.raises(InputError, match="not a span"):
        get_policy("wave_index", {"pinned": text})


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9))), st.integers(0, 50), st.integers(0, 50))
def test_span_positions_are_the_union(pairs, start, stop):
    text = ",".join(f"{first}-{first + more}" for first, more in pairs)
    wanted = {p for first, more in pairs for p in range(first, first + more + 1) if start <= p < stop}
    assert span_positions(parse_spans(text), start, stop, torch.device("cpu")).tolist() == sorted(wanted)


def test_pinned_tokens_are_resident_and_in_no_cluster():
    policy = get_policy("wave_index", {"pinned": "0-9,700-899,1990-1999", "segment": 512})
    index, _, _ = built(policy, 2000, 3)
    pinned = {*range(4, 10), *range(700, 900)}
    for head in range(HEADS):
        assert sorted(index.order[head].tolist()) == sorted(set(range(4, 1936)) - pinned)
        assert index.offsets[head, -1] == index.order.shape[1]
    selection = policy.select(index, queries(3), torch.arange(2000, 2003))
    for step in range(3):
        row = attended(selection, step, 0, slice(0, selection.resident))
        assert row == sorted({*range(4), *pinned, *range(1936, 2001 + step)})
        everything = attended(selection, step, 0)
        assert len(everything) == len(set(everything))


def test_a_cluster_counts_only_tokens_that_are_not_pinned():
    policy = get_policy("wave_index", {"pinned": "100-499"})
    index, _, _ = built(policy, 2000, 1)
    assert index.clusters.sizes.shape[1] == policy.counts(1600).n_centroids


def test_a_prompt_mostly_pinned_grows_like_decode_made_tokens():
    policy = get_policy("wave_index", {"pinned": "100-1499"})
    keys, values = tensors(2000)
    assert policy.build(keys, values, NONE, LAYER).clusters.sizes.shape[1] == 0
    index, _, _ = built(policy, 2000, 1)
    assert index.clusters.sizes.shape[1] == 64 and (index.clusters.sizes.sum(1) == 96).all()
    selection = policy.select(index, queries(1), torch.tensor([2000]))
    resident = attended(selection, 0, 0, slice(0, selection.resident))
    assert resident == [*range(4), *range(100, 2001)]


@pytest.mark.parametrize("last", [1499, 2199, 2700])
def test_decode_made_tokens_can_be_pinned_too(last):
    """Growth segment 1136…2159 loses the pinned part of its tokens, down to none."""
    policy = get_policy("wave_index", {"pinned": f"1136-{last}"})
    n, m = 1200, UPDATE_TOKENS + 1
    index, keys, values = built(policy, n, m)
    growth = index.clusters.sizes[:, policy.counts(index.context).n_centroids :]
    assert growth.shape[1] == 64
    assert (growth.sum(1) == max(0, 2160 - (last + 1))).all()
    positions = torch.tensor([n + m - 1])
    selection = policy.select(index, queries(1), positions)
    row = attended(selection, 0, 0, slice(0, selection.resident))
    assert row == sorted({*range(4), *range(1136, min(last, 2224) + 1), *range(2160, 2225)})
    output, _ = sparse_attention(queries(1), positions, keys, values, selection, LAYER)
    assert output.isfinite().all()


def test_every_refresh_step_is_full():
    policy = get_policy("wave_index", {"refresh": 3})
    index, keys, values = built(policy, 2000, 8)
    positions = torch.arange(2000, 2008)
    selection = policy.select(index, queries(8), positions)
    full = [2, 5]
    exact, _ = exact_attention(queries(8), keys, values, positions, torch.arange(2008), LAYER)
    output, _ = sparse_attention(queries(8), positions, keys, values, selection, LAYER)
    plain = get_policy("wave_index").select(index, queries(8), positions)
    for step in range(8):
        everything = attended(selection, step, 1)
        if step in full:
            assert everything == list(range(2001 + step))
            assert torch.allclose(output[step], exact[step], atol=1e-5)
            assert selection.scan_bytes[step].tolist() == [0] * HEADS
            assert (selection.estimated[step] < 0).all() and selection.truncated[step].sum() == 0
        else:
            assert everything == attended(plain, step, 1)
            assert selection.scan_bytes[step].equal(plain.scan_bytes[step])
    alone = policy.select(index, queries(8)[5:6], positions[5:6])
    assert attended(alone, 0, 1) == attended(selection, 5, 1)


def test_indexes_are_shared_between_refreshes_but_not_between_pins():
    plain = get_policy("wave_index").build_key()
    assert get_policy("wave_index", {"refresh": 5}).build_key() == plain
    assert get_policy("wave_index", {"pinned": "5"}).build_key() != plain


def test_windowed_layer_is_refused():
    keys, values = tensors(64)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("wave_index").build(keys, values, NONE, dataclasses.replace(LAYER, window=32))


def test_negative_refresh_is_refused():
    with pytest.raises(InputError, match="refresh"):
        get_policy("wave_index", {"refresh": -1})
