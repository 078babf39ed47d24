"""ShadowKV's landmarks and outliers against a slow float64 retelling."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy

SMALL = {"sparse_budget": 40, "outlier_chunks": 5}
NONE = torch.empty(HEADS, GROUP, 0, DIM)


def selected(policy, keys, query, prompt, layer=LAYER):
    """Selection at the last position, the first ``prompt`` keys being the prompt."""
    values = torch.zeros_like(keys)
    index = policy.build(keys[:, :prompt], values[:, :prompt], NONE, layer)
    policy.append(index, keys[:, prompt:], values[:, prompt:], torch.arange(prompt, keys.shape[1]))
    return policy.select(index, query, torch.tensor([keys.shape[1] - 1]))


def chunks_of(keys, head, n_chunks):
    return [keys[head, c * 8 : c * 8 + 8].double() for c in range(n_chunks)]


def outliers(keys, head, n_chunks, count):
    """Chunks whose least similar key is the least similar."""
    worst = []
    for chunk in chunks_of(keys, head, n_chunks):
        mean = chunk.mean(0)
        worst.append(min(float(key @ mean / (key.norm() * mean.norm())) for key in chunk))
    return sorted(range(n_chunks), key=lambda c: worst[c])[:count]


def ranked(keys, query, head, n_chunks, excluded):
    """Other chunks by their largest softmax share among the query heads."""
    rest = [c for c in range(n_chunks) if c not in excluded]
    means = torch.stack([chunks_of(keys, head, n_chunks)[c].mean(0) for c in rest])
    shares = torch.softmax(query[0, head].double() @ means.T * LAYER.scaling, -1).amax(0)
    return [rest[i] for i in torch.argsort(shares, descending=True, stable=True).tolist()]


@pytest.mark.parametrize("prompt", [400, 403])
def test_retrieves_the_best_chunks_and_keeps_outliers(prompt):
    policy = get_policy("shadowkv", SMALL)
    keys, _ = tensors(prompt + 9)
    query = queries(1)
    selection = selected(policy, keys, query, prompt)
    n_chunks = 400 // 8 - 4
    for head in range(HEADS):
        kept = outliers(keys, head, n_chunks, 5)
        chunks = ranked(keys, query, head, n_chunks, kept)[:5]
        assert selection.blocks[0, head].tolist() == chunks
        row = selection.positions[0, head].tolist()
        tail = list(range(n_chunks * 8, prompt + 9))
        assert row[: selection.resident] == tail + [c * 8 + i for c in kept for i in range(8)]
        assert row[selection.resident :] == [c * 8 + i for c in chunks for i in range(8)]
        assert selection.block_pages[0, head].tolist() == [1] * 5
    assert selection.scan_bytes[0].tolist() == [(n_chunks - 5) * DIM * LAYER.item_bytes] * HEADS


def test_prompt_with_fewer_chunks_than_outliers_is_resident():
    keys, _ = tensors(400)
    selection = selected(get_policy("shadowkv", {"sparse_budget": 8}), keys, queries(1), 399)
    assert selection.exact_tokens().tolist() == [[400] * HEADS]
    assert selection.resident == 400 and selection.scan_bytes.sum() == 0


def test_nothing_is_scored_where_every_chunk_fits():
    keys, _ = tensors(8 * 20)
    for budget, scored in [(8 * 10, False), (8 * 9, True)]:
        parameters = {"sparse_budget": budget, "outlier_chunks": 5}
        selection = selected(get_policy("shadowkv", parameters), keys, queries(1), 8 * 20 - 8)
        assert bool((selection.scan_bytes > 0).all()) is scored


def test_landmark_of_opposite_keys_is_zero_and_harmless():
    keys, _ = tensors(200)
    keys[:, 1:200:2] = -keys[:, 0:200:2]
    keys[:, 16] = 1e6
    selection = selected(
        get_policy("shadowkv", {"sparse_budget": 16, "outlier_chunks": 1}), keys, queries(1), 199
    )
    for head in range(HEADS):
        row = [p for p in selection.positions[0, head].tolist() if p >= 0]
        assert len(row) == len(set(row)) == 200 - 20 * 8 + 8 + 16


def test_alibi_prefers_nearer_chunks_of_equal_landmark():
    layer = dataclasses.replace(LAYER, alibi=(0.5,) * LAYER.n_heads)
    keys = torch.ones(HEADS, 161, DIM)
    parameters = {"sparse_budget": 16, "outlier_chunks": 0}
    selection = selected(get_policy("shadowkv", parameters), keys, queries(1), 160, layer)
    assert selection.blocks[0, 0].tolist() == [15, 14]


def test_windowed_layer_is_refused():
    keys, values = tensors(64)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("shadowkv").build(keys, values, NONE, dataclasses.replace(LAYER, window=32))


@pytest.mark.parametrize(
    "bad", [{"sparse_budget": 7}, {"chunk": 0}, {"outlier_chunks": -1}, {"local_chunks": -1}]
)
def test_bad_parameters_are_refused(bad):
    with pytest.raises(InputError):
        get_policy("shadowkv", bad)
