"""Budgets of single kv heads in the wave index: each head as if the layer had its budget."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from policy_inputs import HEADS, LAYER, NONE, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy

SHARES = [2.0, 0.25, 1.0, 0.0][:HEADS]
RETRIEVAL = 0.1


def of_head(rows: torch.Tensor, head: int) -> list[list[int]]:
    """What a head holds at each step, without padding."""
    return [[value for value in row if value >= 0] for row in rows[:, head].tolist()]


@pytest.mark.parametrize("more", [{}, {"estimate": "all"}, {"refresh": 3}, {"buffer_clusters": 1}])
@pytest.mark.parametrize("made", [6, 1200])
def test_each_head_chooses_as_alone(made, more):
    """Before and after decode-made tokens have grown into clusters."""
    shared = get_policy("wave_index", {"retrieval": RETRIEVAL, **more})
    policy = dataclasses.replace(shared, head_shares=",".join(map(str, SHARES)))
    keys, values = tensors(5000 + made)
    index = policy.build(keys[:, :5000], values[:, :5000], NONE, LAYER)
    policy.append(index, keys[:, 5000:], values[:, 5000:], torch.arange(5000, 5000 + made))
    positions = torch.arange(5000 + made - 6, 5000 + made)
    found = policy.select(index, queries(6), positions)
    for head, share in enumerate(SHARES):
        alone = dataclasses.replace(shared, retrieval=max(RETRIEVAL * share, 1e-9))
        expected = alone.select(index, queries(6), positions)
        for name in ("positions", "blocks", "estimated"):
            assert of_head(getattr(found, name), head) == of_head(getattr(expected, name), head)
        for name in ("scan_bytes", "truncated"):
            assert torch.equal(getattr(found, name)[:, head], getattr(expected, name)[:, head])
        assert torch.equal(found.read_bytes(LAYER)[:, head], expected.read_bytes(LAYER)[:, head])


def test_equal_shares_are_one_budget_and_share_its_index():
    plain = get_policy("wave_index", {"retrieval": RETRIEVAL})
    equal = dataclasses.replace(plain, head_shares=",".join(["1"] * HEADS))
    assert equal.build_key() == plain.build_key()
    assert equal.head_counts(5000) == HEADS * plain.head_counts(5000) == HEADS * [plain.counts(5000)]
    half = dataclasses.replace(plain, retrieval=RETRIEVAL / 2, head_shares=",".join(["2"] * HEADS))
    assert half.head_counts(5000)[0].nprobe == plain.counts(5000).nprobe


@pytest.mark.parametrize("text", ["1,-1", "a", "1,,2", "nan", "inf", ","])
def test_senseless_shares_are_refused(text):
    with pytest.raises(InputError, match="head_shares"):
        get_policy("wave_index", {"head_shares": text})


def test_shares_of_another_number_of_heads_are_refused():
    policy = get_policy("wave_index", {"head_shares": ",".join(["1"] * (HEADS + 1))})
    with pytest.raises(InputError, match=f"names {HEADS + 1} kv heads, there are {HEADS}"):
        policy.build(*tensors(2000), NONE, LAYER)
