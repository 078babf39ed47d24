"""SnapKV against a slow float64 retelling."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy


def prompt(count, seed=3):
    return queries(count, seed).permute(1, 2, 0, 3)


def selected(policy, keys, prompt_queries, positions, n, layer=LAYER):
    values = torch.zeros_like(keys)
    index = policy.build(keys[:, :n], values[:, :n], prompt_queries, layer)
    policy.append(index, keys[:, n:], values[:, n:], torch.arange(n, keys.shape[1]))
    return policy.select(index, queries(len(positions)), torch.tensor(positions))


def slow_choice(keys, prompt_queries, policy, head, n):
    """Tokens before the window that SnapKV keeps, as a set."""
    count, window = prompt_queries.shape[2], policy.window
    scores = torch.zeros(n, dtype=torch.float64)
    for member in range(GROUP):
        for w in range(count):
            position = n - count + w
            logits = keys[head, : position + 1].double() @ prompt_queries[head, member, w].double()
            scores[: position + 1] += torch.softmax(logits * LAYER.scaling, 0)
    smooth = []
    for at in range(n - window):
        near = scores[max(0, at - policy.kernel // 2) : min(at + policy.kernel // 2 + 1, n - window)]
        smooth.append(float(near.sum() if policy.pooling == "avg" else near.max()))
    best = sorted(range(n - window), key=lambda at: (-smooth[at], at))
    return set(best[: policy.capacity - window])


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize(("n", "kernel", "count"), [(150, 5, 16), (150, 1, 16), (61, 3, 16), (150, 5, 7)])
def test_keeps_what_the_window_attends(n, kernel, count, pooling):
    policy = get_policy("snapkv", {"capacity": 60, "window": 16, "kernel": kernel, "pooling": pooling})
    keys, _ = tensors(n + 3)
    seen = prompt(count)
    selection = selected(policy, keys, seen, [n, n + 2], n)
    for head in range(HEADS):
        kept = slow_choice(keys, seen, policy, head, n)
        for step, position in enumerate([n, n + 2]):
            row = [p for p in selection.positions[step, head].tolist() if p >= 0]
            assert set(row) == kept | set(range(n - 16, position + 1))
            assert len(row) == 60 + position - n + 1
    assert not selection.scan_bytes.any()


def test_a_prompt_within_capacity_is_kept_whole_even_without_queries():
    policy = get_policy("snapkv", {"capacity": 60, "window": 16})
    keys, _ = tensors(61)
    selection = selected(policy, keys, prompt(0), [60], 60)
    assert selection.positions[0, 0].tolist() == list(range(61))


def test_a_longer_prompt_without_queries_is_refused():
    policy = get_policy("snapkv", {"capacity": 60, "window": 16})
    with pytest.raises(InputError, match="no prompt queries"):
        selected(policy, tensors(62)[0], prompt(0), [61], 61)


def test_one_ranking_serves_every_capacity():
    small, large = (get_policy("snapkv", {"capacity": c, "window": 16}) for c in (40, 90))
    assert small.build_key() == large.build_key()
    keys, values = tensors(201)
    index = small.build(keys[:, :200], values[:, :200], prompt(16), LAYER)
    assert large.select(index, queries(1), torch.tensor([200])).exact_tokens().tolist() == [[91, 91]]
    assert small.select(index, queries(1), torch.tensor([200])).exact_tokens().tolist() == [[41, 41]]


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 120),
    capacity=st.integers(9, 120),
    kind=st.sampled_from(["any", "two values", "one huge"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_always_capacity_tokens_and_finite_scores(n, capacity, kind, dtype, seed):
    keys = torch.randn(HEADS, n, DIM, generator=torch.Generator().manual_seed(seed))
    if kind == "two values":
        keys = keys.sign()
    if kind == "one huge":
        keys[:, n // 2] *= 1e6
    policy = get_policy("snapkv", {"capacity": capacity, "window": 8})
    seen = prompt(min(8, n), seed).to(dtype)
    index = policy.build(keys.to(dtype), keys.to(dtype), seen, LAYER)
    rows = policy.select(index, queries(1), torch.tensor([n])).positions[0]
    for row in rows:
        held = row[row >= 0]
        assert len(held.unique()) == len(held) == min(n, capacity) + 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"capacity": 64}, "capacity must exceed"),
        ({"window": 0}, "window must be 1"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"pooling": "mean"}, "pooling is"),
    ],
)
def test_bad_parameters_are_refused(parameters, message):
    with pytest.raises(InputError, match=message):
        get_policy("snapkv", parameters)


def test_a_windowed_layer_is_refused():
    layer = dataclasses.replace(LAYER, window=512)
    keys, values = tensors(10)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("snapkv").build(keys, values, prompt(1), layer)
