"""Attention of the prompt's last queries against float64 loops."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from policy_inputs import GROUP, HEADS, LAYER, queries, tensors

from kvtune.policies import observed
from kvtune.policies.observed import best_tokens, pooled, prompt_attention, summed_attention

N, W = 37, 9
FEATURES = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": tuple(range(HEADS * GROUP))},
    "alibi": {"alibi": tuple(0.1 * (head + 1) for head in range(HEADS * GROUP))},
}


def slow_mass(query, keys, position, layer, head):
    """Probabilities of every key for one query head, float64 [N]."""
    weights = torch.zeros(keys.shape[0], dtype=torch.float64)
    for at in range(position + 1):
        logit = float(query.double() @ keys[at].double()) * layer.scaling
        if layer.softcap is not None:
            logit = layer.softcap * math.tanh(logit / layer.softcap)
        if layer.alibi is not None:
            logit -= layer.alibi[head] * (position - at)
        weights[at] = math.exp(logit)
    sink = 0.0 if layer.sinks is None else math.exp(layer.sinks[head])
    return weights / (weights.sum() + sink)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("chunk", [1, 1 << 25])
def test_probabilities_equal_the_slow_ones(monkeypatch, feature, chunk):
    monkeypatch.setattr(observed, "_CHUNK_ITEMS", chunk)
    layer = dataclasses.replace(LAYER, **FEATURES[feature])
    keys, prompt = tensors(N)[0] / 3, queries(W).permute(1, 2, 0, 3)
    seen = []
    for positions, mass in prompt_attention(prompt, keys, layer):
        for row, position in enumerate(positions.tolist()):
            seen.append(position)
            for head in range(HEADS * GROUP):
                kv, member = divmod(head, GROUP)
                query = prompt[kv, member, position - (N - W)]
                expected = slow_mass(query, keys[kv], position, layer, head)
                assert (mass[row, kv, member].double() - expected).abs().max() < 1e-5
    assert seen == list(range(N - W, N))
    total = torch.cat([mass for _, mass in prompt_attention(prompt, keys, layer)]).sum((0, 2))
    assert torch.allclose(summed_attention(prompt, keys, layer), total, atol=1e-5)


def test_no_queries_say_nothing_and_too_many_are_cut():
    keys, _ = tensors(5)
    prompt = queries(8).permute(1, 2, 0, 3)
    assert list(prompt_attention(prompt[:, :, :0], keys, LAYER)) == []
    cut = summed_attention(prompt[:, :, -5:], keys, LAYER)
    assert torch.equal(summed_attention(prompt, keys, LAYER), cut)
    assert torch.allclose(cut.sum(1), torch.full((HEADS,), 5.0 * GROUP))


@pytest.mark.parametrize("kernel", [1, 3, 5, 13])
@pytest.mark.parametrize("n", [1, 2, 20])
def test_pooling_equals_its_definition(kernel, n):
    scores = torch.rand(HEADS, n, generator=torch.Generator().manual_seed(n))
    for head in range(HEADS):
        for at in range(n):
            near = scores[head, max(0, at - kernel // 2) : at + kernel // 2 + 1].double()
            assert abs(float(pooled(scores, kernel, "avg")[head, at]) - float(near.sum()) / kernel) < 1e-6
            assert float(pooled(scores, kernel, "max")[head, at]) == float(near.max())


def test_ties_go_to_the_earliest():
    scores = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0]])
    assert best_tokens(scores, 4).tolist() == [[1, 3, 4, 0]]
    assert best_tokens(scores, 9).tolist() == [[1, 3, 4, 0, 2]]
