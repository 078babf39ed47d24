"""The wave index against a slow float64 retelling of RetroInfer."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.retroinfer import UPDATE_TOKENS


def built(policy, n, m=0):
    keys, values = tensors(n + m)
    index = policy.build(keys[:, :n], values[:, :n], torch.empty(HEADS, GROUP, 0, DIM), LAYER)
    if m:
        policy.append(index, keys[:, n:], values[:, n:], torch.arange(n, n + m))
    return index, keys, values


def rank(index, query, head, visible):
    """Clusters by group-summed softmax of q·c, in float64, empties last to be dropped."""
    centroids = index.clusters.centroids[head, :visible].double()
    total = torch.zeros(visible, dtype=torch.float64)
    for g in range(GROUP):
        total += torch.softmax(centroids @ query[head, g].double() * LAYER.scaling, 0)
    order = torch.argsort(total, descending=True, stable=True).tolist()
    return [c for c in order if index.clusters.sizes[head, c] > 0]


def test_retrieves_and_estimates_the_ranked_clusters():
    policy = get_policy("wave_index", {"segment": 512})
    index, _, _ = built(policy, 2000, 5)
    counts = policy.counts(2000)
    query = queries(1)
    selection = policy.select(index, query, torch.tensor([2004]))
    for head in range(HEADS):
        ranked = rank(index, query[0], head, counts.n_centroids)
        assert selection.blocks[0, head].tolist() == ranked[: counts.nprobe]
        estimated = [c for c in selection.estimated[0, head].tolist() if c >= 0]
        assert estimated == ranked[counts.nprobe : counts.nprobe + counts.es]
        retrieved = []
        for cluster in ranked[: counts.nprobe]:
            start, stop = index.offsets[head, cluster], index.offsets[head, cluster + 1]
            retrieved += index.order[head, start:stop].tolist()
        row = selection.positions[0, head]
        assert row[row >= 0].tolist() == [0, 1, 2, 3, *range(2000 - 64, 2005), *retrieved]


def test_clusters_partition_the_prompt_outside_the_steady_zone():
    index, keys, values = built(get_policy("wave_index", {"segment": 512}), 2000)
    for head in range(HEADS):
        assert sorted(index.order[head].tolist()) == list(range(4, 1936))
        for cluster in range(index.clusters.sizes.shape[1]):
            tokens = index.order[head, index.offsets[head, cluster] : index.offsets[head, cluster + 1]]
            assert len(tokens) == index.clusters.sizes[head, cluster]
            if len(tokens):
                mean = keys[head, tokens].double().mean(0)
                assert torch.allclose(index.clusters.centroids[head, cluster].double(), mean, atol=1e-5)
                total = values[head, tokens].double().sum(0)
                assert torch.allclose(index.clusters.value_sums[head, cluster].double(), total, atol=1e-4)


def test_estimate_all_takes_every_cluster_left():
    policy = get_policy("wave_index", {"estimate": "all"})
    index, _, _ = built(policy, 2000, 1)
    selection = policy.select(index, queries(1), torch.tensor([2000]))
    nonempty = int((index.clusters.sizes[0] > 0).sum())
    assert int((selection.estimated[0, 0] >= 0).sum()) == nonempty - policy.counts(2000).nprobe


def test_full_buffer_drops_clusters_for_good():
    """Clusters of 10 pages into a buffer of 4·nprobe = 80 pages: eight fit, twelve are dropped."""
    policy = get_policy("wave_index", {"estimation": 0.0})
    index, _, _ = built(policy, 2000)
    counts = dataclasses.replace(policy.counts(2000), pages_per_cluster=1, buffer_clusters=1)
    index.clusters.sizes[:] = 8 * 10
    probed = torch.arange(20).expand(1, HEADS, 20)
    kept, pages, tokens, truncated = policy._fill_buffer(index, [counts], probed, torch.tensor([[20]]))
    assert kept[0, 0].tolist() == [*range(8), *[-1] * 12]
    assert pages[0, 0].tolist() == [10] * 8 + [0] * 12 and tokens[0, 0].tolist() == [80] * 8 + [0] * 12
    assert truncated.tolist() == [[12, 12]]


def test_an_index_serves_every_budget_that_shares_its_build_key():
    small, large = (get_policy("wave_index", {"retrieval": r}) for r in (0.01, 0.2))
    assert small.build_key() == large.build_key()
    index, _, _ = built(small, 2000, 1)
    other, _, _ = built(large, 2000, 1)
    shared = large.select(index, queries(1), torch.tensor([2000]))
    own = large.select(other, queries(1), torch.tensor([2000]))
    assert torch.equal(shared.positions, own.positions)


@pytest.mark.parametrize("new", [UPDATE_TOKENS - 1, UPDATE_TOKENS, UPDATE_TOKENS + 1, 2 * UPDATE_TOKENS + 3])
def test_growth_joins_every_1024_tokens(new):
    policy = get_policy("wave_index")
    index, _, _ = built(policy, 1200, new + 1)
    position = 1200 + new
    selection = policy.select(index, queries(1), torch.tensor([position]))
    segments = new // UPDATE_TOKENS
    counts = policy.counts(1200)
    row = selection.positions[0, 0, : selection.resident]
    tail = 1200 - 64 + segments * UPDATE_TOKENS
    assert row[row >= 0].tolist() == [0, 1, 2, 3, *range(tail, position + 1)]
    assert int((selection.blocks[0, 0] >= 0).sum()) == counts.nprobe + segments
    visible = counts.n_centroids + 64 * segments
    assert int(selection.scan_bytes[0, 0]) == visible * DIM * LAYER.item_bytes


def test_short_prompt_stays_dense_until_1024_tokens_gather():
    policy = get_policy("wave_index")
    index, _, _ = built(policy, 100, 1000)
    before = policy.select(index, queries(1), torch.tensor([4 + 64 + UPDATE_TOKENS - 1]))
    assert before.blocks is None or (before.blocks < 0).all()
    after = policy.select(index, queries(1), torch.tensor([4 + 64 + UPDATE_TOKENS]))
    assert int((after.blocks[0, 0] >= 0).sum()) == 1


def test_estimate_is_a_lower_bound_on_the_cluster_mass():
    """Jensen: size·e^{q·mean} ≤ Σ e^{q·k}."""
    index, keys, _ = built(get_policy("wave_index"), 2000)
    query = queries(1)[0]
    for head in range(HEADS):
        for cluster in range(index.clusters.sizes.shape[1]):
            tokens = index.order[head, index.offsets[head, cluster] : index.offsets[head, cluster + 1]]
            if len(tokens):
                dots = keys[head, tokens].double() @ query[head, 0].double() * LAYER.scaling
                mean = keys[head, tokens].double().mean(0) @ query[head, 0].double() * LAYER.scaling
                assert len(tokens) * math.exp(mean) <= torch.exp(dots).sum() * (1 + 1e-9)


@pytest.mark.parametrize(
    "bad",
    [{"retrieval": 0}, {"retrieval": 1.5}, {"estimation": -0.1}, {"tokens_per_centroid": 1}, {"local": 0},
     {"segment": 10}, {"estimate": "some"}, {"sink": -1}, {"retrieval": "many"}, {"local": 1.5}],
)  # fmt: skip
def test_bad_parameters_are_refused(bad):
    with pytest.raises(InputError):
        get_policy("wave_index", bad)
