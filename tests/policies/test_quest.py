"""Quest against a slow float64 retelling, and its bound against every key."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.quest import page_bound

NONE = torch.empty(HEADS, GROUP, 0, DIM)


def selected(policy, keys, query, position, layer=LAYER):
    values = torch.zeros_like(keys)
    index = policy.build(keys[:, :position], values[:, :position], NONE, layer)
    policy.append(index, keys[:, position:], values[:, position:], torch.arange(position, keys.shape[1]))
    return policy.select(index, query, torch.tensor([position]))


def best_pages(keys, query, head, n_pages, size):
    """Pages from best to worst, by the highest bound of any query head."""
    scores = []
    for page in range(n_pages):
        rows = keys[head, page * size : (page + 1) * size].double()
        bounds = [
            sum(max(q * c for c in rows[:, channel].tolist()) for channel, q in enumerate(row.tolist()))
            for row in query[0, head].double()
        ]
        scores.append(max(bounds))
    return sorted(range(n_pages), key=lambda page: -scores[page])


@pytest.mark.parametrize(("position", "size"), [(320, 16), (335, 16), (336, 16), (101, 10)])
def test_reads_the_best_pages_and_the_own_one(position, size):
    policy = get_policy("quest", {"token_budget": 6 * size, "page_size": size})
    keys, _ = tensors(position + 1)
    query = queries(1)
    selection = selected(policy, keys, query, position)
    own = position // size
    for head in range(HEADS):
        pages = best_pages(keys, query, head, own, size)[:5]
        assert selection.blocks[0, head].tolist() == pages
        retrieved = [token for page in pages for token in range(page * size, (page + 1) * size)]
        assert selection.positions[0, head].tolist() == [*range(own * size, position + 1), *retrieved]
        assert selection.block_pages[0, head].tolist() == [-(-size // 8)] * 5
    assert selection.scan_bytes[0].tolist() == [own * 2 * DIM * LAYER.item_bytes] * HEADS


@settings(deadline=None)
@given(
    n=st.integers(1, 60),
    size=st.integers(1, 20),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    kind=st.sampled_from(["any", "two values", "one huge"]),
    seed=st.integers(0, 1000),
)
def test_bound_is_never_below_the_best_key_of_the_page(n, size, scale, kind, seed):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(HEADS, n, DIM, generator=generator) * scale
    if kind == "two values":
        keys = keys.sign() * scale
    if kind == "one huge":
        keys[:, n // 2] *= 1e6
    policy = get_policy("quest", {"page_size": size})
    index = policy.build(keys, torch.zeros_like(keys), NONE, LAYER)
    query = queries(3, seed)
    bound = page_bound(query, index.low, index.high).double()
    dots = torch.einsum("thgd,hnd->thgn", query.double(), keys.double())
    largest = torch.einsum("thgd,hnd->thgn", query.abs().double(), keys.abs().double())
    assert bound.shape[-1] == n // size
    for page in range(n // size):
        tokens = slice(page * size, (page + 1) * size)
        rounding = 1e-5 * largest[..., tokens].amax(-1)
        assert (bound[..., page] >= dots[..., tokens].amax(-1) - rounding).all()
        assert index.low[:, page].equal(keys[:, tokens].amin(1))
        assert index.high[:, page].equal(keys[:, tokens].amax(1))


@settings(deadline=None, max_examples=20)
@given(cuts=st.lists(st.integers(1, 70), min_size=1, max_size=6))
def test_pages_do_not_depend_on_how_keys_arrive(cuts):
    keys, values = tensors(sum(cuts))
    policy = get_policy("quest")
    index = policy.build(keys[:, : cuts[0]], values[:, : cuts[0]], NONE, LAYER)
    start = cuts[0]
    for length in cuts[1:]:
        new = slice(start, start + length)
        policy.append(index, keys[:, new], values[:, new], torch.arange(start, start + length))
        start += length
    whole = policy.build(keys, values, NONE, LAYER)
    assert index.low.equal(whole.low) and index.high.equal(whole.high) and index.rest.equal(whole.rest)


def test_budget_is_three_pages_at_least_and_counts_the_own_page():
    keys, _ = tensors(201)
    for budget, blocks in [(1, 2), (48, 2), (64, 3), (79, 3), (80, 4)]:
        selection = selected(get_policy("quest", {"token_budget": budget}), keys, queries(1), 200)
        assert (selection.blocks >= 0).sum(-1).tolist() == [[blocks] * HEADS]


def test_nothing_is_scored_where_every_page_fits():
    keys, _ = tensors(80)
    fits, exceeds = (
        selected(get_policy("quest", {"token_budget": budget}), keys, queries(1), 79) for budget in (80, 64)
    )
    assert fits.exact_tokens().tolist() == [[80] * HEADS] and fits.scan_bytes.sum() == 0
    assert exceeds.exact_tokens().tolist() == [[64] * HEADS] and (exceeds.scan_bytes > 0).all()


def test_alibi_prefers_nearer_pages_of_equal_bound():
    layer = dataclasses.replace(LAYER, alibi=(0.5,) * LAYER.n_heads)
    keys = torch.ones(HEADS, 161, DIM)
    selection = selected(get_policy("quest", {"token_budget": 64}), keys, queries(1), 160, layer)
    assert selection.blocks[0, 0].tolist() == [9, 8, 7]


def test_windowed_layer_is_refused():
    keys, values = tensors(64)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("quest").build(keys, values, NONE, dataclasses.replace(LAYER, window=32))


@pytest.mark.parametrize("bad", [{"token_budget": 0}, {"page_size": 0}, {"page_size": 1.5}])
def test_bad_parameters_are_refused(bad):
    with pytest.raises(InputError):
        get_policy("quest", bad)
