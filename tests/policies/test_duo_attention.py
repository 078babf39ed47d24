"""DuoAttention's choice of heads against float64 loops, and what each kind of head attends."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from policy_inputs import DIM, GROUP, HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy

SHAPE = {"sink": 4, "recent": 20, "prompt_queries": 10}
N = 90


def prompt(count=10, seed=3):
    return queries(count, seed).permute(1, 2, 0, 3)


def slow_lost(keys, prompt_queries, head, sink, recent):
    """Mean softmax mass outside sinks and recent tokens, float64."""
    n, count = keys.shape[1], prompt_queries.shape[2]
    lost = 0.0
    for w in range(count):
        position = n - count + w
        for member in range(GROUP):
            logits = keys[head, : position + 1].double() @ prompt_queries[head, member, w].double()
            mass = torch.softmax(logits * LAYER.scaling, 0)
            lost += sum(float(mass[at]) for at in range(sink, position + 1) if position - at >= recent)
    return lost / (count * GROUP)


def far_and_near():
    """Keys of which head 0 looks at a far token, head 1 at the recent ones; and the queries."""
    keys, _ = tensors(N + 5)
    seen = prompt()
    keys[0, 40] = 3 * seen[0].mean((0, 1)) / seen[0].mean((0, 1)).norm()
    seen[0] = keys[0, 40] * 4
    seen[1] = 0
    keys[1, : N - 25] = 0
    keys[1, 4 : N - 25, 0] = -40
    seen[1, ..., 0] = 4
    return keys, seen


@pytest.mark.parametrize("shape", [SHAPE, {**SHAPE, "sink": 0, "recent": 1}, {**SHAPE, "recent": 500}])
def test_lost_mass_equals_the_slow_one(shape):
    keys, values = tensors(N)
    index = get_policy("duo_attention", shape).build(keys, values, prompt(), LAYER)
    for head in range(HEADS):
        expected = slow_lost(keys, prompt(), head, shape["sink"], shape["recent"])
        assert abs(float(index.lost[head]) - expected) < 1e-5


def test_the_head_that_looks_far_keeps_everything_the_other_streams():
    keys, seen = far_and_near()
    policy = get_policy("duo_attention", SHAPE)
    index = policy.build(keys[:, :N], keys[:, :N], seen, LAYER)
    assert policy.retrieval_heads(index).tolist() == [True, False]
    positions = torch.tensor([N, N + 4])
    selection = policy.select(index, queries(2), positions)
    for step, position in enumerate(positions.tolist()):
        full, streaming = (sorted(set(row.tolist()) - {-1}) for row in selection.positions[step])
        assert full == list(range(position + 1))
        assert streaming == [*range(4), *range(position - 19, position + 1)]


def test_coverage_orders_the_heads():
    keys, values = tensors(N)
    shares = []
    for coverage in (0.0, 0.2, 0.5, 0.9, 1.0):
        policy = get_policy("duo_attention", {**SHAPE, "coverage": coverage})
        index = policy.build(keys, values, prompt(), LAYER)
        expected = [slow_lost(keys, prompt(), h, 4, 20) >= 1 - coverage for h in range(HEADS)]
        assert policy.retrieval_heads(index).tolist() == expected
        shares.append(sum(expected))
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == HEADS


def test_no_prompt_queries_are_refused():
    policy = get_policy("duo_attention")
    keys, values = tensors(N)
    index = policy.build(keys, values, torch.empty(HEADS, GROUP, 0, DIM), LAYER)
    with pytest.raises(InputError, match="no prompt queries"):
        policy.select(index, queries(1), torch.tensor([N]))


def test_windowed_layers_and_bad_parameters_are_refused():
    keys, values = tensors(N)
    with pytest.raises(InputError, match="sliding window"):
        get_policy("duo_attention").build(keys, values, prompt(), dataclasses.replace(LAYER, window=64))
    for parameters in ({"coverage": 1.1}, {"sink": -1}, {"recent": 0}, {"prompt_queries": 0}):
        with pytest.raises(InputError, match=next(iter(parameters))):
            get_policy("duo_attention", parameters)
