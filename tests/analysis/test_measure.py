from __future__ import annotations

import math

import pytest
import torch

from kvtune.analysis.evaluate import decode_queries
from kvtune.analysis.measure import ExactOnly, measure_attention, measure_neighbour, measure_policy
from kvtune.analysis.metrics import METRICS
from kvtune.policies import get_policy
from kvtune.traces import open_trace

K = 10


@pytest.fixture(scope="module")
def timeline(tiny_trace):
    return open_trace(tiny_trace).timelines(0)[0]


def slow_probabilities(layer, step, head):
    """Softmax over the eligible tokens of one step and query head, {position: p}, in float64."""
    position = int(decode_queries(layer).positions[step])
    window = layer.info.window or position + 1
    rows = range(max(0, position - window + 1), position + 1)
    query = layer.queries[layer.query_positions == position][0, head].double()
    keys = layer.keys[head // layer.info.group].double()
    logits = {row: float(query @ keys[row]) * layer.info.scaling for row in rows}
    peak = max(logits.values())
    total = sum(math.exp(logit - peak) for logit in logits.values())
    return {row: math.exp(logit - peak) / total for row, logit in logits.items()}


def by_name(observations):
    return {(seen.metric, seen.lag): seen for seen in observations}


@pytest.mark.parametrize("number", [0, 2])
def test_attention_measures_equal_slow_references(timeline, number, monkeypatch):
    monkeypatch.setattr("kvtune.analysis.measure._CHUNK_ITEMS", 4 * 88 * 5)  # several chunks
    layer = timeline.layer(number)
    found = by_name(measure_attention(layer, timeline.prompt_length, k=K, lags=(1, 2)).observations)
    steps = decode_queries(layer)
    for step in range(0, len(steps.positions), 5):
        for head in range(4):
            p = slow_probabilities(layer, step, head)
            ordered = sorted(p.values(), reverse=True)
            reached = 0.0
            needed = next(n for n in range(1, len(p) + 1) if (reached := reached + ordered[n - 1]) >= 0.95)

            def value(metric, step=step, head=head):
                return float(found[metric, None].values[step, head])

            assert value("entropy") == pytest.approx(-sum(q * math.log(q) for q in p.values()), abs=1e-4)
            assert value("tokens_95") == needed
            assert value("token_share_95") == pytest.approx(needed / len(p))
            assert value("sink_mass") == pytest.approx(sum(q for row, q in p.items() if row < 4), abs=1e-5)
            late = sum(q for row, q in p.items() if row >= timeline.prompt_length)
            assert value("late_mass") == pytest.approx(late, abs=1e-5)
        assert int(found["visible_tokens", None].values[step]) == len(p)


def test_every_observation_is_declared_and_fits_its_heads(timeline):
    layer = timeline.layer(1)
    below = measure_attention(timeline.layer(0), timeline.prompt_length, k=K, lags=(1, 4))
    ranking = measure_attention(layer, timeline.prompt_length, k=K, lags=(1, 4))
    observations = [
        *ranking.observations,
        *measure_neighbour(below, ranking, layer),
        *measure_policy(layer, timeline.prompt_length, get_policy("oracle_topk", {"tokens": 8, "local": 4})),
    ]
    columns = {"query": 4, "kv": 2, "layer": 1}
    for seen in observations:
        assert seen.values.shape == (len(seen.turns), columns[METRICS[seen.metric].heads])
        if METRICS[seen.metric].unit == "share":
            assert bool(((seen.values >= 0) & (seen.values <= 1 + 1e-6)).all()), seen.metric


def test_lag_pairs_never_cross_turns(timeline):
    found = by_name(
        measure_attention(timeline.layer(0), timeline.prompt_length, k=K, lags=(1, 8, 16)).observations
    )
    assert len(found["query_cosine", 1].turns) == 2 * (9 - 1)
    assert len(found["query_cosine", 8].turns) == 2 * 1
    assert ("query_cosine", 16) not in found


def test_neighbouring_layers_are_compared_by_mean_probability(timeline):
    rankings = [measure_attention(timeline.layer(n), timeline.prompt_length, k=K) for n in (0, 1)]
    shared = by_name(measure_neighbour(*rankings, timeline.layer(1)))["layer_overlap", None]
    for step in (0, 7):
        tops = []
        for number in (0, 1):
            heads = [slow_probabilities(timeline.layer(number), step, head) for head in range(4)]
            mean = {row: sum(p[row] for p in heads) for row in heads[0]}
            tops.append(set(sorted(mean, key=lambda row: -mean[row])[:K]))
        assert float(shared.values[step]) == pytest.approx(len(tops[0] & tops[1]) / K)


def test_layers_that_are_apart_or_windowed_are_not_compared(timeline):
    rankings = [measure_attention(timeline.layer(n), timeline.prompt_length, k=K) for n in (0, 1, 2)]
    assert measure_neighbour(None, rankings[0], timeline.layer(0)) == []
    assert measure_neighbour(rankings[0], rankings[2], timeline.layer(2)) == []
    assert measure_neighbour(rankings[1], rankings[2], timeline.layer(2)) == []


def test_dropping_the_estimation_zone_changes_nothing_but_the_estimate(timeline):
    wave = get_policy("wave_index", {"sink": 2, "local": 4, "retrieval": 0.1, "estimation": 0.5})
    layer, index = timeline.layer(0), None
    index = wave.build(layer.keys, layer.values, torch.zeros(2, 2, 0, 8), layer.info)
    steps = decode_queries(layer)
    whole = wave.select(index, steps.queries, steps.positions)
    bare = ExactOnly(wave).select(index, steps.queries, steps.positions)
    assert bare.estimated is None
    assert torch.equal(bare.positions, whole.positions)


def test_full_attention_loses_nothing_and_reads_everything(timeline):
    found = by_name(measure_policy(timeline.layer(0), timeline.prompt_length, get_policy("full")))
    seen = by_name(measure_attention(timeline.layer(0), timeline.prompt_length, k=K).observations)
    assert float(found["error", None].values.max()) < 1e-5
    assert float(found["mass", None].values.min()) == pytest.approx(1.0, abs=1e-5)
    read, full = found["read_bytes", None].values, seen["full_read_bytes", None].values
    assert torch.equal(read, full.expand_as(read))
    assert ("error_without_estimation", None) not in found
