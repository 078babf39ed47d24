"""H2O against a slow float64 retelling, one step and head at a time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy

SMALL = {"heavy_ratio": 0.1, "recent_ratio": 0.2, "min_tokens": 5, "prompt_queries": 12}
N, STEPS = 80, 30


def prompt(count=12, seed=3):
    return queries(count, seed).permute(1, 2, 0, 3)


def started(policy, keys, n, seen, layer=LAYER):
    values = torch.zeros_like(keys)
    index = policy.build(keys[:, :n], values[:, :n], seen, layer)
    policy.append(index, keys[:, n:], values[:, n:], torch.arange(n, keys.shape[1]))
    return index


def slow_cache(keys, seen, decode, positions, head, n, heavy, recent):
    """The set attended at each of ``positions``, tokens and scores in plain Python."""
    scores = {token: 0.0 for token in range(n)}

    def attend(query, tokens, position):
        visible = [t for t in tokens if t <= position]
        logits = keys[head, visible].double() @ query.double() * LAYER.scaling
        for token, share in zip(visible, torch.softmax(logits, 0).tolist()):
            scores[token] += share

    count = seen.shape[2]
    for w in range(count):
        for member in range(GROUP):
            attend(seen[head, member, w], range(n), n - count + w)
    history, last = [], n - 1
    for step, position in enumerate(positions):
        for token in range(last + 1, position + 1):
            scores[token] = 0.0
        last = position
        if len(scores) > heavy + recent:
            old = sorted(t for t in scores if t <= position - recent)
            best = sorted(old, key=lambda t: (-scores[t], t))[:heavy]
            scores = {t: scores[t] for t in scores if t in best or t > position - recent}
        history.append(set(scores))
        before = dict(scores)
        for member in range(GROUP):
            attend(decode[step, head, member], sorted(before), position)
    return history


@pytest.mark.parametrize(
    "positions",
    [list(range(N, N + STEPS)), [N, N + 1, N + 9, N + 10, N + 29]],
    ids=["every step", "gaps"],
)
def test_keeps_heavy_hitters_and_recent_tokens(positions):
    policy = get_policy("h2o", SMALL)
    keys, _ = tensors(N + STEPS)
    decode = queries(len(positions), 7)
    selection = policy.select(started(policy, keys, N, prompt()), decode, torch.tensor(positions))
    for head in range(HEADS):
        expected = slow_cache(keys, prompt(), decode, positions, head, N, 8, 16)
        for step in range(len(positions)):
            row = [p for p in selection.positions[step, head].tolist() if p >= 0]
            assert row == sorted(expected[step])
            assert len(row) == 24
    assert selection.scan_bytes.unique().tolist() == [24 * 4]


def test_a_cache_that_is_not_full_drops_nothing():
    policy = get_policy("h2o", {**SMALL, "min_tokens": 50})
    keys, _ = tensors(N + STEPS)
    positions = torch.arange(N, N + STEPS)
    selection = policy.select(started(policy, keys, N, prompt()), queries(STEPS), positions)
    for step, position in enumerate(positions.tolist()):
        held = set(selection.positions[step, 0].tolist()) - {-1}
        assert len(held) == min(position + 1, 100)
    assert selection.scan_bytes[0].tolist() == [0, 0] and selection.scan_bytes[-1].tolist() == [400, 400]


def test_runs_of_several_budgets_on_one_index_do_not_mix():
    small, large = get_policy("h2o", SMALL), get_policy("h2o", {**SMALL, "heavy_ratio": 0.4})
    assert small.build_key() == large.build_key()
    keys, _ = tensors(N + STEPS)
    shared, positions = started(small, keys, N, prompt()), torch.arange(N, N + STEPS)
    for policy in (small, large, small):
        alone = policy.select(started(policy, keys, N, prompt()), queries(STEPS), positions)
        parts = []
        for part in (slice(0, 9), slice(9, STEPS)):
            parts.append(policy.select(shared, queries(STEPS)[part], positions[part]).positions)
            if policy is small:
                large.select(shared, queries(STEPS)[:3], positions[:3])
        assert torch.equal(torch.cat(parts), alone.positions)


def test_a_step_back_into_a_run_is_refused():
    policy = get_policy("h2o", SMALL)
    keys, _ = tensors(N + STEPS)
    index = started(policy, keys, N, prompt())
    policy.select(index, queries(9), torch.arange(N, N + 9))
    with pytest.raises(ValueError, match="step 84 comes after step 88"):
        policy.select(index, queries(1), torch.tensor([N + 4]))


def test_no_prompt_queries_matter_only_once_something_must_go():
    policy = get_policy("h2o", SMALL)
    keys, _ = tensors(N + 1)
    none = torch.empty(HEADS, GROUP, 0, DIM)
    with pytest.raises(InputError, match="no prompt queries"):
        policy.select(started(policy, keys, N, none), queries(1), torch.tensor([N]))
    rows = policy.select(started(policy, keys[:, :10], 9, none), queries(1), torch.tensor([9])).positions
    assert rows.tolist() == [[list(range(10))] * HEADS]


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 90),
    kind=st.sampled_from(["any", "two values", "one huge"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_the_cache_never_exceeds_its_size_nor_repeats_a_token(n, kind, dtype, seed):
    keys = torch.randn(HEADS, n + 12, DIM, generator=torch.Generator().manual_seed(seed))
    if kind == "two values":
        keys = keys.sign()
    if kind == "one huge":
        keys[:, n // 2] *= 1e6
    policy = get_policy("h2o", SMALL)
    seen = prompt(min(12, n), seed).to(dtype)
    positions = torch.arange(n, n + 12)
    selection = policy.select(started(policy, keys.to(dtype), n, seen), queries(12), positions)
    size = max(int(0.1 * n), 5) + max(int(0.2 * n), 5)
    for step, position in enumerate(positions.tolist()):
        for row in selection.positions[step]:
            held = row[row >= 0]
            assert len(held.unique()) == len(held) == min(position + 1, size)


def test_windowed_layers_and_bad_parameters_are_refused():
    keys, values = tensors(N)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("h2o").build(keys, values, prompt(), dataclasses.replace(LAYER, window=64))
    for parameters in (
        {"heavy_ratio": 1.1},
        {"recent_ratio": -0.1},
        {"min_tokens": 0},
        {"prompt_queries": 0},
    ):
        with pytest.raises(InputError, match=next(iter(parameters))):
            get_policy("h2o", parameters)
