"""Exact attention and the merge of zones, against float64 loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.attention import (
    Zone,
    attention_scores,
    eligible,
    estimation_zone,
    exact_attention,
    group_queries,
    merge_zones,
    reference_attention,
    sparse_attention,
)
from kvtune.geometry import LayerInfo
from kvtune.policies.base import Clusters, Selection

BASE = LayerInfo(0, 1, 6, 2, 8, 4, 0.3, 4)
VARIANTS = {
    "plain": BASE,
    "window": LayerInfo(0, 1, 6, 2, 8, 4, 0.3, 4, window=5),
    "softcap": LayerInfo(0, 1, 6, 2, 8, 4, 0.3, 4, softcap=2.0),
    "sinks": LayerInfo(0, 1, 6, 2, 8, 4, 0.3, 4, sinks=(0.5, -1.0, 2.0, 0.0, 1.0, -3.0)),
    "alibi": LayerInfo(0, 1, 6, 2, 8, 4, 0.3, 4, alibi=(0.5, 0.25, 0.125, 0.1, 0.05, 0.01)),
}


def problem(n=20, steps=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(steps, 6, 8, generator=generator) * 2
    keys = torch.randn(2, n, 8, generator=generator)
    values = torch.randn(2, n, 4, generator=generator)
    return queries, keys, values, torch.arange(n - steps, n), torch.arange(n)


@pytest.mark.parametrize("name", VARIANTS)
def test_batched_equals_float64_reference(name):
    layer = VARIANTS[name]
    queries, keys, values, at, where = problem()
    reference = reference_attention(queries, keys, values, at, where, layer)
    output, _ = exact_attention(group_queries(queries, 2), keys, values, at, where, layer)
    assert torch.allclose(output.flatten(1, 2).double(), reference, atol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_selecting_everything_is_full_attention(name):
    layer = VARIANTS[name]
    queries, keys, values, at, where = problem()
    visible = eligible(at, where, layer.window)
    positions = torch.where(visible, where, -1)[:, None, :].expand(-1, 2, -1)
    selection = Selection(positions, torch.zeros(3, 2, dtype=torch.int64))
    output, _ = sparse_attention(group_queries(queries, 2), at, keys, values, selection, layer)
    reference = reference_attention(queries, keys, values, at, where, layer)
    assert torch.allclose(output.flatten(1, 2).double(), reference, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "softcap", "sinks", "alibi"])
def test_clusters_of_one_token_are_exact(name):
    """A cluster that holds one token estimates it without error, so any split must give full attention."""
    layer = VARIANTS[name]
    queries, keys, values, at, where = problem()
    clusters = Clusters(keys, torch.ones(2, 20, dtype=torch.int64), values, where.float().expand(2, -1))
    visible = eligible(at, where, None)
    exact = torch.where(visible & (where % 3 == 0), where, -1)[:, None, :].expand(-1, 2, -1)
    estimated = torch.where(visible & (where % 3 > 0), where, -1)[:, None, :].expand(-1, 2, -1)
    selection = Selection(exact, torch.zeros(3, 2, dtype=torch.int64), estimated=estimated, clusters=clusters)
    output, _ = sparse_attention(group_queries(queries, 2), at, keys, values, selection, layer)
    reference = reference_attention(queries, keys, values, at, where, layer)
    assert torch.allclose(output.flatten(1, 2).double(), reference, atol=1e-5)


def test_estimation_formula_by_hand():
    """Denominator adds size·e^{q·c}, numerator adds VS·e^{q·c}; an empty cluster adds nothing."""
    queries, keys, values, at, _ = problem(steps=1)
    sizes = torch.tensor([[5, 0, 2], [1, 3, 4]])
    sums = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3))
    clusters = Clusters(keys[:, :3], sizes, sums)
    selection = Selection(
        torch.tensor([[[10, 19], [4, -1]]]),
        torch.zeros(1, 2, dtype=torch.int64),
        estimated=torch.tensor([[[0, 1, 2], [2, -1, -1]]]),
        clusters=clusters,
    )
    output, lse = sparse_attention(group_queries(queries, 2), at, keys, values, selection, BASE)
    for head in range(6):
        kv, q = head // 3, queries[0, head].double()
        top = torch.zeros(4, dtype=torch.float64)
        bottom = 0.0
        for position in [p for p in selection.positions[0, kv].tolist() if p >= 0]:
            weight = math.exp(float(q @ keys[kv, position].double()) * 0.3)
            bottom += weight
            top += weight * values[kv, position].double()
        for cluster in [c for c in selection.estimated[0, kv].tolist() if c >= 0 and sizes[kv, c] > 0]:
            weight = math.exp(float(q @ keys[kv, cluster].double()) * 0.3)
            bottom += int(sizes[kv, cluster]) * weight
            top += weight * sums[kv, cluster].double()
        assert torch.allclose(output[0, kv, head % 3].double(), top / bottom, atol=1e-6)
        assert math.isclose(float(lse[0, kv, head % 3]), math.log(bottom), abs_tol=1e-5)


def test_importance_weights_multiply_the_probabilities():
    queries, keys, values, at, _ = problem(steps=1)
    weights = torch.tensor([2.0, 0.5]).log().expand(1, 2, 3, 2)
    selection = Selection(
        torch.tensor([[[3, 7], [3, 7]]]), torch.zeros(1, 2, dtype=torch.int64), log_weights=weights
    )
    output, _ = sparse_attention(group_queries(queries, 2), at, keys, values, selection, BASE)
    terms = [w * math.exp(float(queries[0, 0] @ keys[0, p]) * 0.3) for p, w in ((3, 2.0), (7, 0.5))]
    by_hand = (terms[0] * values[0, 3] + terms[1] * values[0, 7]) / sum(terms)
    assert torch.allclose(output[0, 0, 0], by_hand, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(1, 19), seed=st.integers(0, 999), scale=st.sampled_from([1.0, 60.0]))
def test_any_split_into_zones_merges_to_the_whole(cut, seed, scale):
    queries, keys, values, at, where = problem(seed=seed)
    logits = attention_scores(group_queries(queries * scale, 2), keys, at, where, BASE)
    whole, whole_lse = merge_zones([Zone(logits, values)], BASE)
    parts = [Zone(logits[..., :cut], values[:, :cut]), Zone(logits[..., cut:], values[:, cut:])]
    merged, lse = merge_zones(parts, BASE)
    assert torch.allclose(merged, whole, atol=1e-5) and torch.allclose(lse, whole_lse, atol=1e-4)


def test_nothing_selected_gives_zero_not_nan():
    output, lse = merge_zones([Zone(torch.full((1, 2, 3, 4), -math.inf), torch.ones(2, 4, 4))], BASE)
    assert (output == 0).all() and (lse == -math.inf).all()


def test_query_heads_of_a_group_share_the_kv_head_in_order():
    """GQA: query head h reads kv head h // group (TransformerLens#1553)."""
    grouped = group_queries(torch.arange(6.0).view(1, 6, 1), 2)
    assert grouped[0, :, :, 0].tolist() == [[0, 1, 2], [3, 4, 5]]


def spread_zone(queries, spreads):
    """Logits of clusters at fixed centroids, sizes 3 and 5."""
    centroids = torch.tensor([[[0.2] * 8, [-0.1] * 8]]).expand(2, -1, -1)
    sizes = torch.tensor([[3, 5]]).expand(2, -1)
    clusters = Clusters(centroids, sizes, torch.ones(2, 2, 4), spreads=spreads)
    chosen = torch.tensor([[[1, 0, -1]]]).expand(len(queries), 2, -1)
    return estimation_zone(queries, torch.zeros(len(queries)), clusters, chosen, BASE).logits, centroids


def test_spread_correction_formula_by_hand():
    queries = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    spreads = torch.tensor([[0.5, 2.0], [1.0, 0.0]])
    logits, centroids = spread_zone(queries, spreads)
    for t, h, g in itertools.product(range(2), range(2), range(3)):
        query = queries[t, h, g].double()
        for column, cluster in enumerate((1, 0)):
            want = 0.3 * float(query @ centroids[h, cluster].double()) + math.log((3, 5)[cluster])
            want += 0.3**2 * float(query @ query) * float(spreads[h, cluster]) / (2 * 8)
            assert float(logits[t, h, g, column]) == pytest.approx(want, abs=1e-5)
        assert logits[t, h, g, 2] == -math.inf
    plain, _ = spread_zone(queries, None)
    torch.testing.assert_close(spread_zone(queries, torch.zeros(2, 2))[0], plain)


def test_spread_correction_is_right_for_keys_that_spread_evenly():
    """Of 50,000 normal keys around a centroid the true weight is found; without spreads it is too small."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 3, 8, generator=generator) * 2
    centroid = torch.randn(2, 1, 8, generator=generator)
    keys = centroid + 0.8 * torch.randn(2, 50_000, 8, generator=generator)
    truth = torch.logsumexp(0.3 * query @ keys.transpose(1, 2), -1)
    sizes, chosen = torch.full((2, 1), 50_000), torch.zeros(1, 2, 1, dtype=torch.int64)
    found = [
        estimation_zone(
            query, torch.zeros(1), Clusters(centroid, sizes, torch.ones(2, 1, 4), spreads=s), chosen, BASE
        ).logits[..., 0]
        for s in (None, torch.full((2, 1), 8 * 0.8**2))
    ]
    torch.testing.assert_close(found[1], truth, atol=0.05, rtol=0)
    assert (found[0] < truth - 0.05).any() and (found[0] < truth + 0.05).all()
