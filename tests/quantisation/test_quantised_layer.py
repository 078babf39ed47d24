"""A layer held in another precision, under any policy, against float64 loops."""

from __future__ import annotations

import math

import pytest
import torch

from kvtune.analysis.evaluate import build_index, decode_queries, evaluate, layer_truth
from kvtune.errors import InputError
from kvtune.geometry import PAGE_TOKENS, ModelGeometry
from kvtune.policies import all_policies, get_policy
from kvtune.quantisation import (
    HeadPrecision,
    PrecisionPlan,
    all_precisions,
    get_precision,
    quantised,
)
from kvtune.traces import TraceWriter, open_trace

NAMES = sorted(all_precisions())
CONTEXT, ANSWER, DIM = 90, 30, 16
MIXED = PrecisionPlan(
    HeadPrecision("kivi2", "int4"), heads={(0, 0): HeadPrecision("int8", "kivi2"), (1, 1): HeadPrecision()}
)


@pytest.fixture(scope="module")
def timeline(tmp_path_factory):
    """bfloat16 vectors of two layers with two kv heads of two query heads; the answer is 30 tokens long."""
    geometry = ModelGeometry(
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=DIM,
        value_dim=DIM,
        dtype="bfloat16",
        max_positions=4096,
        scaling=DIM**-0.5,
        windows=(None, None),
        softcaps=(None, None),
        sinks=(False, False),
    )
    header = {
        "model": "tiny",
        "fingerprint": "0123456789abcdef",
        "geometry": geometry.to_dict(),
        "dtype": "bfloat16",
        "layers": [0, 1],
        "kv_heads": [0, 1],
        "values": True,
        "workload": "random",
        "seed": 0,
    }
    path = tmp_path_factory.mktemp("quantised") / "trace"
    generator = torch.Generator().manual_seed(0)
    writer = TraceWriter(path, header)
    with writer.sample(0) as sample:
        parent, start = -1, 0
        for kind, length, turn in (("context", CONTEXT, -1), ("generated", ANSWER, 0)):
            ids = torch.randint(0, 99, (length,), generator=generator)
            parent = sample.segment(
                kind=kind, request=0, turn=turn, parent=parent, start=start, token_ids=ids
            )
            for layer in (0, 1):
                keys, values = (torch.randn(2, length, DIM, generator=generator) for _ in range(2))
                sample.keys_values(layer, parent, (2 * keys).bfloat16(), values.bfloat16())
                queries = torch.randn(length, 4, DIM, generator=generator).bfloat16()
                steps = torch.arange(length) if kind == "generated" else torch.full((length,), -1)
                sample.queries(layer, parent, torch.arange(start, start + length), steps, turn, queries)
            start += length
        sample.record(0, 0, "random", reference="yes", generated="yes", score=1.0)
    writer.finish()
    return open_trace(path).timelines(0)[0]


def slow_held(layer, precisions, part, head, length, calibrated):
    """Keys or values of one head as a cache of ``length`` tokens gives them back, float64."""
    rows = (layer.keys if part == "keys" else layer.values)[head : head + 1, :length]
    return precisions[head].of(part).round_trip(rows, part, calibrated)[0].double()


def slow_outcome(layer, precisions, selection, calibrated):
    """Error [T, Hq] and mass [T, Hq]: one cache, step and query head at a time."""
    steps = decode_queries(layer)
    error, mass = (torch.zeros(len(steps.positions), 4, dtype=torch.float64) for _ in range(2))
    for t, position in enumerate(steps.positions.tolist()):
        for query_head in range(4):
            head, length = query_head // 2, position + 1
            query = steps.queries[t, head, query_head % 2].double()
            chosen = [p for p in selection.positions[t, head].tolist() if p >= 0]
            keys = slow_held(layer, precisions, "keys", head, length, calibrated)
            values = slow_held(layer, precisions, "values", head, length, calibrated)
            own = torch.softmax(keys[chosen] @ query * layer.info.scaling, 0) @ values[chosen]
            weights = torch.softmax(layer.keys[head, :length].double() @ query * layer.info.scaling, 0)
            exact = weights @ layer.values[head, :length].double()
            error[t, query_head] = (own - exact).norm() / exact.norm()
            mass[t, query_head] = weights[chosen].sum()
    return error, mass


@pytest.mark.parametrize("precision", [*NAMES, MIXED, HeadPrecision("native", "kivi2")], ids=str)
@pytest.mark.parametrize(("policy", "settings"), [("full", {}), ("oracle_topk", {"tokens": 20, "local": 8})])
def test_the_outcome_equals_one_cache_per_step(timeline, policy, settings, precision):
    layer, policy = timeline.layer(0), get_policy(policy, settings)
    held = quantised(layer, precision, CONTEXT)
    steps = decode_queries(held)
    selection = policy.select(build_index(policy, held, CONTEXT), steps.queries, steps.positions)
    error, mass = slow_outcome(layer, held.precisions, selection, CONTEXT)
    result = evaluate(policy, layer, CONTEXT, precision=precision)
    assert torch.allclose(result.error.double(), error, atol=2e-5)
    assert torch.allclose(result.mass.double(), mass, atol=1e-5)


@pytest.mark.parametrize("name", sorted(all_policies()))
def test_every_policy_runs_on_a_quantised_cache(timeline, name):
    result = evaluate(get_policy(name), timeline.layer(0), CONTEXT, precision="int4")
    plain = evaluate(get_policy(name), timeline.layer(0), CONTEXT)
    for column in ("error", "mass", "recall_attention"):
        assert torch.isfinite(getattr(result, column)).all()
    assert result.error.mean() > plain.error.mean() - 0.05
    assert (result.read_bytes < plain.read_bytes).all()


def test_native_changes_nothing(timeline):
    policy = get_policy("oracle_topk", {"tokens": 20, "local": 8})
    layer = timeline.layer(1)
    plain, native = evaluate(policy, layer, CONTEXT), evaluate(policy, layer, CONTEXT, precision="native")
    for column in ("error", "mass", "recall_index", "recall_attention", "read_bytes", "scan_bytes"):
        assert torch.equal(getattr(plain, column), getattr(native, column)), column


def test_the_policy_chooses_by_stored_keys_and_the_truth_stays(timeline):
    layer, policy = timeline.layer(0), get_policy("oracle_topk", {"tokens": 10, "local": 4, "sink": 0})
    result = evaluate(policy, layer, CONTEXT, precision=HeadPrecision("kivi2"))
    exact = evaluate(policy, layer, CONTEXT)
    assert result.mass.mean() < exact.mass.mean()
    held = quantised(layer, HeadPrecision("kivi2"), CONTEXT)
    given = evaluate(
        policy,
        layer,
        CONTEXT,
        index=build_index(policy, held, CONTEXT),
        truth=layer_truth(layer),
        precision=HeadPrecision("kivi2"),
    )
    assert torch.equal(given.error, result.error)


@pytest.mark.parametrize("precision", [*NAMES, MIXED], ids=str)
def test_bytes_are_those_stored(timeline, precision):
    layer, policy = timeline.layer(0), get_policy("full")
    result = evaluate(policy, layer, CONTEXT, precision=precision)
    held = quantised(layer, precision, CONTEXT)
    for t, position in enumerate(result.positions.tolist()):
        length = position + 1
        slots = math.ceil(length / PAGE_TOKENS) * PAGE_TOKENS
        for head in range(2):
            expected = 0.0
            for part in ("keys", "values"):
                stored = held.precisions[head].of(part)
                native = length - int(stored.native_from(torch.tensor(length), part))
                expected += (slots - native) * stored.token_bytes(DIM, part, 2) + native * DIM * 2
            assert int(result.read_bytes[t, head]) == math.ceil(expected)


def test_the_view_has_every_head_in_its_own_precision(timeline):
    layer = timeline.layer(1)
    held = quantised(layer, MIXED, CONTEXT)
    assert torch.equal(held.keys[0], get_precision("kivi2").coded(layer.keys[:1], "keys")[0])
    assert torch.equal(held.values[0], get_precision("int4").coded(layer.values[:1], "values")[0])
    assert torch.equal(held.keys[1], layer.keys[1].float())
    assert held.info == layer.info and torch.equal(held.query_positions, layer.query_positions)
    assert torch.equal(held.decode, layer.decode) and len(held.phases) == len(layer.phases)


def test_scales_come_from_the_prompt(timeline):
    layer = timeline.layer(0)
    held = quantised(layer, "fp8", CONTEXT)
    limit = layer.keys[:, :CONTEXT].float().abs().amax((1, 2))
    assert (held.keys.abs().amax((1, 2)) <= limit * 1.0001).all()


def test_unknown_precisions_are_refused(timeline):
    with pytest.raises(InputError, match="unknown precision 'int5'"):
        evaluate(get_policy("full"), timeline.layer(0), CONTEXT, precision="int5")
