"""The spread correction of estimated clusters: what is kept, what it costs, what it changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from policy_inputs import HEADS, LAYER, built, queries

from kvtune.attention import exact_attention, sparse_attention
from kvtune.errors import InputError
from kvtune.policies import get_policy


@pytest.mark.parametrize("pinned", ["", "1940-3000"])
def test_spreads_are_mean_squared_distances(pinned):
    """In the prompt and in a decode-made segment, full or mostly pinned (then some clusters are empty)."""
    index, keys, _ = built(get_policy("wave_index", {"pinned": pinned}), 2000, 1100)
    assert index.grown == 1 and index.clusters.spreads.shape == index.clusters.sizes.shape
    for head in range(HEADS):
        for cluster in range(index.clusters.sizes.shape[1]):
            members = index.order[head, index.offsets[head, cluster] : index.offsets[head, cluster + 1]]
            found = float(index.clusters.spreads[head, cluster])
            if len(members):
                own = keys[head, members].double()
                want = (own - own.mean(0)).square().sum(1).mean()
                assert found == pytest.approx(float(want), rel=1e-3, abs=1e-5)
            else:
                assert found == 0


def test_the_correction_scales_spreads_and_counts_their_bytes():
    plain = get_policy("wave_index")
    policy = dataclasses.replace(plain, spread_correction=0.5)
    index, _, _ = built(plain, 2000, 2)
    assert policy.build_key() == plain.build_key()
    query, position = queries(1), torch.tensor([2001])
    without, corrected = (p.select(index, query, position) for p in (plain, policy))
    assert without.clusters.spreads is None
    torch.testing.assert_close(corrected.clusters.spreads, 0.5 * index.clusters.spreads)
    assert torch.equal(without.positions, corrected.positions)
    estimated = (without.estimated >= 0).sum(-1)
    assert torch.equal(corrected.read_bytes(LAYER) - without.read_bytes(LAYER), 4 * estimated)
    clusters = HEADS * plain.counts(2000).n_centroids
    assert policy.index_bytes(index, LAYER) - plain.index_bytes(index, LAYER) == 4 * clusters


def test_the_correction_brings_the_mass_nearer_to_the_truth():
    plain = get_policy("wave_index", {"estimation": 1.0})
    index, keys, values = built(plain, 2000, 2)
    query, position = queries(1), torch.tensor([2001])
    _, exact = exact_attention(query, keys, values, position, torch.arange(2002), LAYER)
    errors = []
    for share in (0.0, 1.0):
        selection = dataclasses.replace(plain, spread_correction=share).select(index, query, position)
        _, mass = sparse_attention(query, position, keys, values, selection, LAYER)
        errors.append((mass - exact).abs())
    assert (errors[1] < errors[0]).all()


@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_a_senseless_correction_is_refused(value):
    with pytest.raises(InputError, match="spread_correction"):
        get_policy("wave_index", {"spread_correction": value})
