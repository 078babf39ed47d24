"""Splits of a layer's bytes over its kv heads against an exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtune.tuning import Bench, shipped_default
from kvtune.tuning.allocation import allocate
from kvtune.tuning.heads import Measured, splits

numbers = st.integers(1, 30).map(float)


@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_no_choice_of_as_few_bytes_loses_less(data, heads, settings):
    def row():
        return np.array(data.draw(st.lists(numbers, min_size=heads, max_size=heads)))

    measured = [Measured({"retrieval": i}, row(), row()) for i in range(settings)]
    every = [
        (
            sum(measured[i].read_bytes[h] for h, i in enumerate(pick)),
            sum(measured[i].loss[h] for h, i in enumerate(pick)),
        )
        for pick in itertools.product(range(settings), repeat=heads)
    ]
    found = splits(measured)
    for split in found:
        assert split.read_bytes == sum(measured[i].read_bytes[h] for h, i in enumerate(split.heads))
        assert split.loss == sum(measured[i].loss[h] for h, i in enumerate(split.heads))
        assert split.loss <= min(loss for read, loss in every if read <= split.read_bytes)
    assert found[0].read_bytes == min(read for read, _ in every)
    assert found[-1].loss == min(loss for _, loss in every)
    assert all(b.read_bytes > a.read_bytes and b.loss < a.loss for a, b in itertools.pairwise(found))


def test_budgets_per_head_lower_the_loss_at_the_same_bytes(clustered_trace):
    bench = Bench(clustered_trace, [0, 1], clustered_trace.layers)
    plan = shipped_default().plan
    cap = 1.3 * bench.score(plan, 0.05).read_bytes_per_step
    layerwise, headwise = (allocate(bench, plan, cap, per_head=flag) for flag in (False, True))
    assert not any("head_shares" in own for own in layerwise.overrides.values())
    assert any("head_shares" in own for own in headwise.overrides.values())
    before, after = bench.score(layerwise, 0.05), bench.score(headwise, 0.05)
    assert after.read_bytes_per_step <= cap and after.error_mean < before.error_mean
