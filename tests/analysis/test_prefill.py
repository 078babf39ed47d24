"""Sparse-prefill patterns on recorded prompt queries, against float64 loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtune.analysis.prefill import pattern_mask, prefill_pattern_error
from kvtune.errors import InputError
from kvtune.geometry import LayerInfo
from kvtune.policies import get_policy
from kvtune.traces import open_trace

PROMPT = 65
PATTERNS = [
    ("a_shape", {"sink": 2, "recent": 8}),
    ("a_shape", {"sink": 0, "recent": 1}),
    ("tri_shape", {"sink": 2, "recent": 8, "n_last": 20}),
    ("streaming", {"sink": 4, "recent": 30}),
]


@pytest.fixture(scope="module")
def timeline(tiny_trace):
    return next(iter(open_trace(tiny_trace).timelines(0)))


def slow_rule(pattern, position, key, window):
    """Whether the pattern lets the query at ``position`` attend ``key``."""
    distance = position - key
    if distance < 0 or (window is not None and distance >= window):
        return False
    if position >= PROMPT - getattr(pattern, "n_last", 0):
        return True
    return key < pattern.sink or distance < pattern.recent


@pytest.mark.parametrize(("name", "parameters"), PATTERNS)
@pytest.mark.parametrize("number", [0, 2])
def test_mass_and_error_equal_the_slow_ones(timeline, number, name, parameters):
    assert timeline.prompt_length == PROMPT
    layer, pattern = timeline.layer(number), get_policy(name, parameters)
    found = prefill_pattern_error(layer, PROMPT, pattern)
    assert found.positions.tolist() == list(range(PROMPT))
    info = layer.info
    for t, position in enumerate(found.positions.tolist()):
        seen = [p for p in range(position + 1) if info.window is None or position - p < info.window]
        kept = [row for row, p in enumerate(seen) if slow_rule(pattern, position, p, info.window)]
        assert int(found.attended[t]) == len(kept)
        for head in range(info.n_heads):
            kv = head // info.group
            logits = layer.keys[kv, seen].double() @ layer.queries[t, head].double() * info.scaling
            weights, values = torch.softmax(logits, 0), layer.values[kv, seen].double()
            exact = weights @ values
            own = torch.softmax(logits[kept], 0) @ values[kept]
            assert abs(float(found.mass[t, head]) - float(weights[kept].sum())) < 1e-5
            error = float((own - exact).norm() / exact.norm())
            assert abs(float(found.error[t, head]) - error) < 1e-4 * max(1.0, error)


def test_a_pattern_that_covers_the_prompt_is_exact(timeline):
    found = prefill_pattern_error(timeline.layer(0), PROMPT, get_policy("a_shape", {"recent": PROMPT}))
    assert torch.allclose(found.mass, torch.ones_like(found.mass), atol=1e-6)
    assert float(found.error.max()) < 1e-6


def test_the_last_queries_are_exact_under_tri_shape_only(timeline):
    shape = {"sink": 1, "recent": 4}
    a = prefill_pattern_error(timeline.layer(0), PROMPT, get_policy("a_shape", shape))
    tri = prefill_pattern_error(timeline.layer(0), PROMPT, get_policy("tri_shape", {**shape, "n_last": 10}))
    assert torch.equal(a.error[:-10], tri.error[:-10])
    assert float(tri.error[-10:].max()) < 1e-6 < float(a.error[-10:].min())


def test_decode_queries_and_later_prompts_are_left_out(timeline):
    pattern = get_policy("a_shape", {"sink": 1, "recent": 4})
    found = prefill_pattern_error(timeline.layer(1), len(timeline), pattern)
    decoded = timeline.layer(1).query_positions[timeline.layer(1).decode].tolist()
    assert not set(found.positions.tolist()) & set(decoded)
    assert prefill_pattern_error(timeline.layer(1), 7, pattern).positions.tolist() == list(range(7))


def test_no_prompt_queries_are_refused(timeline):
    with pytest.raises(InputError, match="no prompt queries"):
        prefill_pattern_error(timeline.layer(0), 0, get_policy("a_shape"))


@given(
    n=st.integers(1, 40),
    sink=st.integers(0, 10),
    recent=st.integers(1, 50),
    window=st.none() | st.integers(1, 30),
)
def test_mask_follows_the_rule(n, sink, recent, window):
    info = LayerInfo(0, 1, 1, 1, 4, 4, 0.5, window=window)
    pattern = get_policy("a_shape", {"sink": sink, "recent": recent})
    mask = pattern_mask(torch.arange(n), n, pattern, info)
    for position in range(n):
        for key in range(n):
            inside = window is None or position - key < window
            wanted = key <= position and inside and (key < sink or position - key < recent)
            assert bool(mask[position, key]) == wanted
