"""From a trace to step times: the demand is what the evaluation reads, the misses are the simulator's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from clustered_traces import GEOMETRY
from machines import machine

import kvtune
from kvtune.analysis.evaluate import access_log, evaluate
from kvtune.errors import InputError
from kvtune.hardware import (
    break_even,
    full_traffic,
    measure_demand,
    predict,
    step_cost,
    wave_traffic,
    weights_bytes,
)
from kvtune.hardware.break_even import contexts_up_to
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan

POLICY = get_policy("wave_index", {"retrieval": 0.05})


@pytest.fixture(scope="module")
def trace(clustered_trace):
    return kvtune.open_trace(clustered_trace)


@pytest.fixture(scope="module")
def demand(trace):
    return measure_demand(trace, POLICY)


def test_the_demand_is_what_the_evaluation_reads(trace, demand):
    results = kvtune.simulate(demand.log, [0.05, 0.2], "wave")
    for number in (0, 1):
        scans, reads = [], []
        for sample in range(trace.n_samples):
            (timeline,) = trace.timelines(sample)
            found = evaluate(POLICY, timeline.layer(number), timeline.prompt_length, recall=False)
            scans.append(found.scan_bytes.double().sum(1).numpy())
            reads.append(found.read_bytes.double().sum(1).numpy())
        layer = demand.traffic(results[0])[number]
        assert layer.scan_bytes == pytest.approx(np.concatenate(scans).mean())
        total = layer.scan_bytes + layer.estimation_bytes + layer.exact_bytes
        assert total == pytest.approx(np.concatenate(reads).mean())
    for result in results:
        missed = sum(layer.missed_bytes for layer in demand.traffic(result))
        assert missed == pytest.approx(result.transfer_bytes_per_step)
        assert all(layer.fetched <= layer.missed_bytes for layer in demand.traffic(result))
    assert all(layer.missed_bytes == 0 for layer in demand.traffic())


def test_the_log_is_the_simulators_own(trace, demand):
    theirs = access_log(trace, POLICY)
    assert set(demand.log.units) == set(theirs.units)
    for unit, accesses in theirs:
        mine = demand.log.units[unit]
        for name in ("offsets", "blocks", "pages", "tokens", "truncated"):
            assert np.array_equal(getattr(mine, name), getattr(accesses, name))


def test_the_windowed_layer_is_dense(demand):
    assert demand.tokens == pytest.approx(1500 + 3.5) and demand.longest == 1506
    traffic = demand.traffic()
    assert [layer.dense for layer in traffic] == [False, False, True]
    assert traffic[2] == full_traffic(GEOMETRY, demand.tokens)[2]


def test_a_layer_not_measured_is_the_mean_of_those_that_were(trace, demand):
    one = measure_demand(trace, POLICY, [1])
    assert one.traffic()[0] == one.traffic()[1] == demand.traffic()[1]
    assert one.traffic()[2].dense
    windowed = measure_demand(trace, POLICY, [2])
    with pytest.raises(InputError, match="no layer was measured"):
        windowed.traffic()
    dense = measure_demand(trace, Plan(POLICY, dense_layers=(0, 1)), [0])
    assert dense.traffic() == full_traffic(GEOMETRY, dense.tokens)
    with pytest.raises(InputError, match="layer 5 is not in the trace"):
        measure_demand(trace, POLICY, [5])


def test_the_whole_policy_of_full_attention_costs_what_full_attention_costs(trace):
    full = measure_demand(trace, get_policy("full"))
    found = predict(machine(), full, kvtune.simulate(full.log, [0.1], "wave"), weights_bytes=1e8)
    (row,) = found["rows"]
    assert row["step"]["total_ms"] == pytest.approx(found["full"]["step"]["total_ms"])
    assert row["max_batch"] == found["full"]["max_batch"]


def test_a_prediction(demand):
    curve = kvtune.simulate(demand.log, [0.02, 0.2], "wave")
    found = predict(machine(), demand, curve, weights_bytes=1e8, batch=4)
    json.dumps(found, allow_nan=False)
    assert found["batch"] == 4 and found["offload"] == "cpu" and len(found["rows"]) == 2
    small, large = found["rows"]
    for row, result in zip(found["rows"], curve):
        cost = step_cost(machine(), GEOMETRY, demand.traffic(result), batch=4, weights_bytes=1e8)
        assert row["step"]["total_ms"] == pytest.approx(cost.seconds * 1e3)
        assert row["tokens_per_second"] == pytest.approx(4 / cost.seconds)
        tokens = (result.tally.accesses[0, 2] - result.tally.hits[0, 0, 2]) * 2 * 16 * 4
        steps = sum(layer.steps for layer in demand.layers.values()) / len(demand.layers)
        fetched = row["step"]["bytes"]["fetch"]
        assert fetched == pytest.approx(4 * tokens / steps)
        assert fetched < 4 * result.transfer_bytes_per_step  # the last page of a block is seldom full
    assert large["step"]["total_ms"] <= small["step"]["total_ms"]
    assert large["max_batch"] <= small["max_batch"]
    assert large["gpu_bytes"]["cache"] == 2 * 2 * round(0.2 * 1500 / 8) * 8 * 2 * 16 * 4
    assert large["gpu_bytes"]["kv"] == 2 * 64 * 2 * 16 * 4  # the layer with a window
    kept = predict(machine(), demand, curve, weights_bytes=1e8, batch=4, offload="none")
    assert kept["rows"][0]["step"] == kept["rows"][1]["step"]
    assert kept["rows"][0]["gpu_bytes"]["cache"] == 0
    assert [row["batch"] for row in found["break_even"]] == [1, 2, 4, 8, 16, 32, 64]


def test_without_a_link_the_kv_stays_on_the_device(demand):
    curve = kvtune.simulate(demand.log, [0.2], "wave")
    unlinked = machine(host_to_device=None)
    assert predict(unlinked, demand, curve, weights_bytes=1e8)["offload"] == "none"
    with pytest.raises(InputError, match="no link"):
        predict(unlinked, demand, curve, weights_bytes=1e8, offload="cpu")


def test_break_even_is_where_the_steps_cross():
    contexts = contexts_up_to(1 << 20)
    assert contexts[0] == 1024 and contexts[-1] == 1 << 20 and len(contexts) == 11
    rows = break_even(
        machine(), GEOMETRY, lambda context: wave_traffic(GEOMETRY, context, hit_ratio=0.9), contexts
    )

    def faster(batch: int, context: int) -> bool:
        ours = step_cost(machine(), GEOMETRY, wave_traffic(GEOMETRY, context, hit_ratio=0.9), batch=batch)
        full = step_cost(machine(), GEOMETRY, full_traffic(GEOMETRY, context), batch=batch, offload="none")
        return ours.seconds < full.seconds

    assert any(row.context is not None for row in rows)
    for row in rows:
        wins = [faster(row.batch, context) for context in contexts]
        start = len(wins) - wins[::-1].index(False) if False in wins else 0
        assert row.context == (contexts[start] if start < len(contexts) else None)
        assert (row.speedup > 1) == wins[-1]
    found = [row.context or 1 << 30 for row in rows]
    assert found == sorted(found, reverse=True), "a larger batch pays from no longer a context"


def test_any_policy_is_judged_at_the_traces_own_context(trace):
    demand = measure_demand(trace, get_policy("streaming"))
    curve = kvtune.simulate(demand.log, [0.1], "wave")
    found = predict(machine(), demand, curve, weights_bytes=0.0, batch=3)
    assert {row["context"] for row in found["break_even"]} <= {1504, None}
    assert 3 in [row["batch"] for row in found["break_even"]]


def test_weights(trace):
    assert weights_bytes(trace, 1000) == (4000, "given")
    count, source = weights_bytes(trace)
    assert source == "estimated" and count == 4 * 3 * (64 * (128 + 64) + 3 * 3.5 * 64 * 64)
    for bad in (0, -1, float("nan")):
        with pytest.raises(InputError, match="cannot have"):
            weights_bytes(trace, bad)


def test_a_packaged_model_brings_its_own(trace, monkeypatch):
    monkeypatch.setitem(trace.manifest, "model", "smollm2-135m")
    assert weights_bytes(trace) == (4 * 134_515_008, "packaged")
