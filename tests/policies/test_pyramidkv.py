"""PyramidKV's budget by layer, and that it selects as SnapKV does with that budget."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_inputs import HEADS, LAYER, queries, tensors

from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.pyramidkv import past_budget


def test_budgets_worked_out_by_hand():
    """32 layers, 2048 tokens, window 32: 2016 // 20 = 100 last, 3932 first, 123 less a layer."""
    budgets = [past_budget(100_000, 2016, 32, 20, layer, 32) for layer in range(32)]
    assert budgets[:3] == [3932, 3809, 3686]
    assert budgets[31] == 3932 - 31 * 123 == 119


def test_a_prompt_below_twice_the_average_gets_the_average_everywhere():
    assert [past_budget(4031, 2016, 32, 20, layer, 32) for layer in (0, 31)] == [2016, 2016]
    assert past_budget(4032, 2016, 32, 20, 0, 32) == 3932


def test_what_the_first_layer_cannot_use_goes_to_the_last():
    """4032 tokens of which 132 window: the first layer keeps all 3900, the last 132 instead of 100."""
    assert past_budget(4032, 2016, 132, 20, 0, 32) == 3900
    assert past_budget(4032, 2016, 132, 20, 31, 32) == 3900 - 31 * ((3900 - 132) // 31)


@given(
    length=st.integers(2, 20_000),
    capacity=st.integers(2, 8000),
    window=st.integers(1, 128),
    beta=st.integers(1, 40),
    n_layers=st.integers(1, 80),
)
def test_budgets_fall_fit_and_average_out(length, capacity, window, beta, n_layers):
    average = capacity - window
    if average <= 0 or length < capacity:
        return
    budgets = [past_budget(length, average, window, beta, layer, n_layers) for layer in range(n_layers)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] >= 0 and budgets[0] <= length - window
    assert average <= sum(budgets) / n_layers <= average + n_layers / 2


@pytest.mark.parametrize("number", [0, 3, 7])
def test_selects_as_snapkv_with_the_layers_budget(number):
    n = 600
    layer = dataclasses.replace(LAYER, layer=number)
    keys, values = tensors(n)
    pyramid = get_policy("pyramidkv", {"capacity": 120, "window": 20, "beta": 10})
    past = 190 - number * (180 // 7)
    snap = get_policy("snapkv", {"capacity": past + 20, "window": 20})
    rows = []
    for policy in (pyramid, snap):
        index = policy.build(keys, values, queries(20).permute(1, 2, 0, 3), layer)
        rows.append(policy.select(index, queries(1), torch.tensor([n])).positions)
    assert torch.equal(*rows)
    assert rows[0].shape == (1, HEADS, past + 21)


def test_the_mean_over_layers_is_the_capacity():
    policy = get_policy("pyramidkv")
    held = [policy.past_tokens(50_000, dataclasses.replace(LAYER, layer=i, n_layers=28)) for i in range(28)]
    assert abs(sum(held) / 28 + policy.window - policy.capacity) <= 14


def test_shallow_models_and_bad_beta():
    assert past_budget(5000, 100, 32, 20, 0, 1) == 100
    with pytest.raises(InputError, match="beta"):
        get_policy("pyramidkv", {"beta": 0})
