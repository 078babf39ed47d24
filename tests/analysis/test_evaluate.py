"""Recall, mass, error and bytes of a policy on a recorded layer, against float64 loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvtune.analysis.evaluate import (
    access_log,
    build_index,
    decode_queries,
    evaluate,
    layer_truth,
    prompt_queries,
)
from kvtune.attention import reference_attention
from kvtune.caching.access_log import join_accesses, unit_accesses
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.traces import open_trace

POLICY = get_policy("oracle_topk", {"tokens": 20, "sink": 2, "local": 8})


@pytest.fixture(scope="module")
def timeline(tiny_trace):
    return next(iter(open_trace(tiny_trace).timelines(0)))


def slow_measures(timeline, number, policy):
    """Every measure of one layer, one step and query head at a time."""
    layer = timeline.layer(number)
    index = build_index(policy, layer, timeline.prompt_length)
    steps = decode_queries(layer)
    selection = policy.select(index, steps.queries, steps.positions)
    info = layer.info
    rows = []
    for t, position in enumerate(steps.positions.tolist()):
        for head in range(info.n_heads):
            kv, query = head // info.group, layer.queries[layer.decode][t, head].double()
            chosen = [p for p in selection.positions[t, kv].tolist() if p >= 0]
            resident = [p for p in selection.positions[t, kv, : selection.resident].tolist() if p >= 0]
            seen = list(range(position + 1))
            logits = (layer.keys[kv, seen].double() @ query) * info.scaling
            weights = torch.softmax(logits, 0)
            outside = [p for p in seen if p not in resident]
            top_index = sorted(outside, key=lambda p: -logits[p])[:100]
            top_all = sorted(seen, key=lambda p: -logits[p])[:100]
            exact = weights @ layer.values[kv, seen].double()
            own = torch.softmax(logits[chosen], 0) @ layer.values[kv, chosen].double()
            rows.append(
                {
                    "recall_index": np.mean([p in chosen for p in top_index]) if top_index else 1.0,
                    "recall_attention": np.mean([p in chosen for p in top_all]),
                    "mass": float(weights[chosen].sum()),
                    "error": float((own - exact).norm() / exact.norm()),
                }
            )
    return rows


@pytest.mark.parametrize("number", [0, 1])
def test_measures_equal_slow_references(timeline, number):
    result = evaluate(POLICY, timeline.layer(number), timeline.prompt_length)
    rows = slow_measures(timeline, number, POLICY)
    for name in ("recall_index", "recall_attention", "mass", "error"):
        got = getattr(result, name).flatten().double()
        assert torch.allclose(got, torch.tensor([row[name] for row in rows]).double(), atol=1e-5), name


def test_truth_is_full_attention(timeline):
    layer = timeline.layer(2)
    steps = decode_queries(layer)
    expected = reference_attention(
        layer.queries[layer.decode],
        layer.keys,
        layer.values,
        steps.positions,
        layer.key_positions,
        layer.info,
    )
    assert torch.allclose(layer_truth(layer).outputs.flatten(1, 2).double(), expected, atol=1e-5)


def test_full_attention_is_without_loss_and_reads_everything(timeline):
    layer = timeline.layer(0)
    result = evaluate(get_policy("full"), layer, timeline.prompt_length)
    assert result.error.max() < 1e-5 and torch.allclose(result.mass, torch.ones_like(result.mass))
    assert (result.recall_index == 1).all() and (result.recall_attention == 1).all()
    pages = torch.ceil((result.positions + 1) / 8)
    assert torch.equal(result.read_bytes[:, 0].double(), pages.double() * layer.info.page_bytes)


def test_given_index_and_truth_change_nothing(timeline):
    layer = timeline.layer(1)
    index, truth = build_index(POLICY, layer, timeline.prompt_length), layer_truth(layer)
    first = evaluate(POLICY, layer, timeline.prompt_length)
    second = evaluate(POLICY, layer, timeline.prompt_length, index=index, truth=truth, recall=False)
    assert torch.equal(first.error, second.error) and torch.equal(first.read_bytes, second.read_bytes)
    assert second.recall_index.numel() == 0


def test_prompt_queries_are_the_last_before_the_answer(timeline):
    layer = timeline.layer(0)
    window = prompt_queries(layer, timeline.prompt_length, 3)
    at = [layer.query_positions.tolist().index(timeline.prompt_length - 3 + i) for i in range(3)]
    for head in range(layer.info.n_heads):
        got = window[head // layer.info.group, head % layer.info.group]
        assert torch.equal(got, layer.queries[at, head])
    assert prompt_queries(layer, timeline.prompt_length, 0).shape[2] == 0


def test_access_log_has_every_unit_and_all_steps(tiny_trace):
    trace = open_trace(tiny_trace)
    log = access_log(trace, Plan(POLICY, dense_layers=(0,)))
    assert len(log.units) == trace.n_samples * len(trace.layers) * 2
    for (_, _, layer, _), unit in log:
        assert unit.steps == len(decode_queries(next(iter(trace.timelines(0))).layer(layer)).positions)
        assert (len(unit.blocks) == 0) == (layer in (0, 2))  # dense, and windowed
        assert unit.truncated.sum() == 0


def test_joined_accesses_are_those_of_all_steps_at_once(timeline):
    layer = timeline.layer(1)
    index = build_index(POLICY, layer, timeline.prompt_length)
    steps = decode_queries(layer)
    whole = unit_accesses(POLICY.select(index, steps.queries, steps.positions), 1, 60)
    parts = [
        unit_accesses(POLICY.select(index, steps.queries[c], steps.positions[c]), 1, 60)
        for c in (slice(0, 5), slice(5, None))
    ]
    joined = join_accesses(parts, 60)
    for name in ("offsets", "blocks", "pages", "tokens", "truncated"):
        assert np.array_equal(getattr(joined, name), getattr(whole, name)), name
    assert not math.isnan(joined.context_tokens)


def test_mass_is_probability_covered_whatever_the_importance_weights(timeline):
    """MagicPIG's weights re-normalise the output; the mass stays the softmax share of the tokens used."""
    layer = timeline.layer(1)
    policy = get_policy("magicpig", {"local": 4, "bits": 3, "tables": 20})
    result = evaluate(policy, layer, timeline.prompt_length)
    index, steps = build_index(policy, layer, timeline.prompt_length), decode_queries(layer)
    selection = policy.select(index, steps.queries, steps.positions)
    for t, position in enumerate(steps.positions.tolist()):
        logits = (
            layer.keys[1, : position + 1].double() @ steps.queries[t, 1, 0].double()
        ) * layer.info.scaling
        used = selection.log_weights[t, 1, 0] > -math.inf
        tokens = [p for p, u in zip(selection.positions[t, 1].tolist(), used.tolist()) if u and p >= 0]
        assert math.isclose(
            float(result.mass[t, 2]), float(torch.softmax(logits, 0)[tokens].sum()), abs_tol=1e-5
        )
