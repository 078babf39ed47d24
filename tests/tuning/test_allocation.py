"""Per-layer budgets against an exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.tuning import Bench, allocation, shipped_default
from kvtune.tuning.allocation import TAIL_WEIGHT, UNITS, Rung, allocate, cheapest_loss

rungs = st.lists(
    st.builds(Rung, st.just({}), st.integers(1, 50).map(float), st.integers(0, 50).map(float)),
    min_size=1,
    max_size=4,
)


@given(layers=st.lists(rungs, min_size=1, max_size=4), cap=st.integers(1, 200))
def test_choice_is_the_best_that_fits(layers, cap):
    table = dict(enumerate(layers))
    chosen = cheapest_loss(table, cap)
    choices = [
        (sum(r.read_bytes for r in pick), sum(r.loss for r in pick)) for pick in itertools.product(*layers)
    ]
    rounding = 1 - len(layers) / UNITS
    if chosen is None:
        assert min(c[0] for c in choices) > cap * rounding
        return
    assert sum(r.read_bytes for r in chosen.values()) <= cap
    loss = sum(r.loss for r in chosen.values())
    assert loss <= min((l for b, l in choices if b <= cap * rounding), default=loss) + 1e-9


@pytest.mark.parametrize("room", [1.0, 1.3])
def test_allocation_lowers_the_error_within_the_cap(clustered_trace, room):
    """At its own bytes a plan is at worst kept as it is; with room to spend it improves."""
    bench = Bench(clustered_trace, [0, 1], clustered_trace.layers)
    plan = shipped_default().plan
    before = bench.score(plan, 0.05)
    cap = room * before.read_bytes_per_step
    spread = allocate(bench, plan, cap)
    after = bench.score(spread, 0.05)
    assert after.read_bytes_per_step <= cap
    assert after.error_mean < before.error_mean or (room == 1.0 and spread == plan)
    assert 2 not in spread.overrides  # the windowed layer is not the policy's


def test_allocation_says_when_nothing_fits(clustered_trace):
    bench = Bench(clustered_trace, [0], clustered_trace.layers)
    assert allocate(bench, shipped_default().plan, 10.0) is None


def test_rounds_find_what_the_ladder_misses(clustered_trace):
    """The objective never rises with more rounds, and here finer settings lower it."""
    bench = Bench(clustered_trace, [0, 1], clustered_trace.layers)
    plan = shipped_default().plan
    cap = bench.score(plan, 0.05).read_bytes_per_step
    losses = []
    for rounds in (0, 1, 4):
        spread = allocate(bench, plan, cap, rounds=rounds)
        assert bench.score(spread, 0.05).read_bytes_per_step <= cap
        errors = np.concatenate([bench.outcome(spread, i, n).errors.ravel() for i in (0, 1) for n in (0, 1)])
        losses.append(errors.mean() + TAIL_WEIGHT * (errors**2).mean())
    assert losses[2] <= losses[1] <= losses[0] and losses[2] < losses[0]


def test_settings_that_the_policy_refuses_are_left_out(clustered_trace, monkeypatch):
    bench = Bench(clustered_trace, [0], clustered_trace.layers)
    plan = shipped_default().plan
    monkeypatch.setattr(allocation, "ladder", lambda policy: [{"retrieval": 0.018}, {"retrieval": 2.0}])
    monkeypatch.setattr(allocation, "neighbours", lambda *args: [])
    assert allocate(bench, plan, 1e9) == plan


def test_layers_that_the_plan_keeps_dense_count_for_their_bytes(clustered_trace):
    bench = Bench(clustered_trace, [0, 1], clustered_trace.layers)
    plan = Plan(get_policy("wave_index"), dense_layers=(0,))
    cap = bench.score(plan, 0.05).read_bytes_per_step
    spread = allocate(bench, plan, cap, rounds=1)
    assert spread.dense_layers == (0,) and set(spread.overrides) <= {1}
    assert bench.score(spread, 0.05).read_bytes_per_step <= cap
