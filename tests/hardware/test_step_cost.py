"""The cost formula against a computation by hand, and what must hold for any traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import DENSE, GEOMETRY, SPARSE, STAGES, TRAFFIC, machine

from kvtune.errors import InputError
from kvtune.hardware import TERMS, Features, LayerTraffic, layer_cost, stage_features, step_cost

BYTES = ("scan_bytes", "estimation_bytes", "exact_bytes", "missed_bytes")
US = 1e-6


def test_a_step_by_hand():
    cost = step_cost(machine(), GEOMETRY, TRAFFIC, batch=4, weights_bytes=5e8)
    node = 2 * US
    rows = 6_400_000 / (16 * 2)  # index rows of both kv heads
    scan = node + 4 * 6_400_000 / 1e12
    choose = node + 4 * rows * 2 * 4 * 2 / 1e12
    id_copy = node + 4 * (2_560_000 / 64) * 4 * 2 / 8e11
    estimate = node + 4 * 1_200_000 / 2.5e11  # rows of 32 bytes
    lookup = node
    # 12 MB: a ninth of the way from 1 MB (100 us) to 100 MB (5,000 us)
    fetch = node + (100 + (12e6 - 1e6) / 99e6 * 4900) * US
    attend = node + 4 * 2_560_000 / 5e11  # a page's eight keys: 256 bytes
    update = node + 2 * 4 * 3_000_000 / 8e11
    append = node + 2 * 4 * 2 * 64 / 8e11
    sparse = scan + choose + id_copy + max(estimate, lookup + fetch) + attend + update + append + 10 * US
    dense = node + 4 * 50_000 / 1e12 + append + 10 * US
    projections = max(5e8 / 1e12, 2 * 4 * 2.5e8 / 1e14)
    launches = 30 * US
    assert cost.seconds == pytest.approx(2 * sparse + dense + projections + launches, rel=1e-12)
    assert cost.tokens_per_second == pytest.approx(4 / cost.seconds)
    assert cost.layers[0].attention_seconds == pytest.approx(sparse - 10 * US, rel=1e-12)
    expected = {
        "scan": 2 * scan, "choose": 2 * choose, "id_copy": 2 * id_copy, "estimate": 2 * estimate,
        "lookup": 2 * lookup, "fetch": 2 * fetch, "attend": 2 * attend + node + 4 * 50_000 / 1e12,
        "update": 2 * update, "append": 3 * append, "fixed": 30 * US,
        "projections": projections, "launches": launches,
    }  # fmt: skip
    document = cost.to_dict()
    assert document["terms"] == pytest.approx({name: 1e3 * value for name, value in expected.items()})
    assert document["hidden_ms"] == pytest.approx(2e3 * estimate)
    assert document["bytes"]["fetch"] == 2 * 4 * 3_000_000
    assert document["bytes"]["projections"] == 5e8
    assert document["bound_by"] == "PCIe"
    waited = 2 * (fetch - node)
    assert document["shares"]["PCIe"] == pytest.approx(waited / cost.seconds)


def test_fitted_stages_by_hand():
    hardware = machine(stages=STAGES)
    terms = layer_cost(hardware, GEOMETRY.layer(0), SPARSE, batch=2).terms
    assert terms["scan"].seconds == pytest.approx(3 * US + 2 * 6_400_000 / 5e11)
    assert terms["choose"].seconds == pytest.approx(
        4 * US + (300 / 2) ** 2 * 1.5e-9
    )  # pairs of blocks of one kv head
    assert terms["fetch"].seconds == pytest.approx(7 * US + 2 * 3_000_000 / 4e10)
    assert terms["attend"].seconds == pytest.approx(6 * US + 2 * 2_560_000 / 2e11)
    assert terms["lookup"].seconds == pytest.approx(2 * US)
    dense = layer_cost(hardware, GEOMETRY.layer(2), DENSE, batch=2).terms
    assert dense["attend"].seconds == pytest.approx(1 * US + 2 * 50_000 / 9e11)


def test_estimates_made_by_the_attention_are_in_its_term():
    hardware = machine(stages={**STAGES, "estimation": "in_attend"})
    cost = layer_cost(hardware, GEOMETRY.layer(0), SPARSE, batch=2)
    assert "estimate" not in cost.terms and cost.hidden == 0
    assert cost.terms["attend"].seconds == pytest.approx(6 * US + 2 * (2_560_000 + 1_200_000) / 2e11)


def test_kept_on_the_device_nothing_is_looked_up_or_fetched():
    terms = layer_cost(machine(), GEOMETRY.layer(0), SPARSE, offload="none").terms
    assert set(terms) == {"scan", "choose", "id_copy", "estimate", "attend", "append", "fixed"}
    assert terms["attend"].seconds == pytest.approx(2 * US + 2_560_000 / 2.5e11)  # rows, not pages
    assert step_cost(machine(), GEOMETRY, TRAFFIC, offload="none").hidden == 0


def test_the_slower_of_estimate_and_fetch_is_waited_for():
    layer = GEOMETRY.layer(0)
    quick = layer_cost(machine(), layer, replace(SPARSE, missed_bytes=0.0))
    node, estimate = 2 * US, 2 * US + 1_200_000 / 2.5e11
    assert quick.hidden == pytest.approx(2 * node)
    assert quick.terms["estimate"].seconds == pytest.approx(estimate)
    step = step_cost(machine(), GEOMETRY, (replace(SPARSE, missed_bytes=0.0),) * 3)
    assert "PCIe" not in step.shares


@pytest.mark.parametrize(
    ("batch", "weights", "traffic", "bound"),
    [
        (1, 0.0, LayerTraffic(exact_bytes=1e3, dense=True), "launch"),
        (1, 0.0, LayerTraffic(exact_bytes=1e9, dense=True), "device memory"),
        (1, 2e9, LayerTraffic(exact_bytes=1e3, dense=True), "device memory"),
        (500, 2e9, LayerTraffic(exact_bytes=1e3, dense=True), "compute"),
        (8, 0.0, replace(SPARSE, missed_bytes=1e8), "PCIe"),
    ],
)
def test_what_saturates(batch, weights, traffic, bound):
    cost = step_cost(machine(), GEOMETRY, (traffic,) * 3, batch=batch, weights_bytes=weights)
    assert cost.bound_by == bound
    assert sum(cost.shares.values()) == pytest.approx(1)


amounts = st.floats(0, 1e9)
layers = st.builds(
    LayerTraffic, scan_bytes=amounts, estimation_bytes=amounts, exact_bytes=amounts, missed_bytes=amounts,
    blocks=st.floats(0, 1e4), dense=st.booleans(),
)  # fmt: skip
hardware = st.sampled_from(
    [machine(), machine(stages=STAGES), machine(stages={**STAGES, "estimation": "in_attend"})]
)


@given(
    hardware, st.lists(layers, min_size=3, max_size=3), st.integers(1, 64), st.sampled_from(["cpu", "none"])
)
def test_terms_sum_to_the_total_by_the_max_rule(machine_, traffic, batch, offload):
    cost = step_cost(machine_, GEOMETRY, tuple(traffic), batch=batch, weights_bytes=1e9, offload=offload)
    document = cost.to_dict()
    assert tuple(document["terms"]) == TERMS
    assert sum(document["terms"].values()) == pytest.approx(document["total_ms"] + document["hidden_ms"])
    hidden = sum(
        min(layer.terms["estimate"].seconds, layer.terms["lookup"].seconds + layer.terms["fetch"].seconds)
        for layer in cost.layers
        if {"estimate", "fetch"} <= set(layer.terms)
    )
    assert cost.hidden == pytest.approx(hidden)
    assert sum(document["shares"].values()) == pytest.approx(1)


@given(
    hardware, layers, st.sampled_from(BYTES), st.floats(1, 1e8), st.integers(1, 16),
    st.sampled_from(["cpu", "none"]),
)  # fmt: skip
def test_more_bytes_and_larger_batches_are_never_cheaper(machine_, layer, field, more, batch, offload):
    heavier = replace(layer, **{field: getattr(layer, field) + more})

    def seconds(traffic: LayerTraffic, count: int) -> float:
        return step_cost(machine_, GEOMETRY, (traffic,) * 3, batch=count, offload=offload).seconds

    least = seconds(layer, batch) * (1 - 1e-12)
    assert seconds(heavier, batch) >= least
    assert seconds(layer, batch + 1) >= least


@given(st.floats(0, 1e9), st.floats(0, 1e8))
def test_a_larger_transfer_is_never_faster(n_bytes, more):
    assert machine().transfer_seconds(n_bytes + more) >= machine().transfer_seconds(n_bytes) * (1 - 1e-12)


def test_a_transfer_between_the_measured_sizes():
    plain = machine()
    assert plain.transfer_seconds(0) == 0
    assert plain.transfer_seconds(500) == pytest.approx(0.5e-6)
    assert plain.transfer_seconds(1_000_000) == pytest.approx(1e-4)
    assert plain.transfer_seconds(300_000_000) == pytest.approx(0.015)
    with pytest.raises(ValueError, match="no link"):
        machine(host_to_device=None).transfer_seconds(1)


def test_gathers_go_by_the_nearest_size():
    assert machine().gather_rate(16) == 2.5e11
    assert machine().gather_rate(2048) == 5e11
    memory = {"bytes": 1, "read_bytes_per_second": 3.0, "copy_bytes_per_second": 2.0}
    assert machine(device_memory=memory).gather_rate(64) == 3.0


def test_without_graphs_a_kernel_is_a_launch():
    launch = {"kernel_us": 5.0, "layer_overhead_us": 0.0, "step_overhead_us": 0.0}
    cost = step_cost(machine(launch=launch), GEOMETRY, TRAFFIC)
    assert cost.layers[0].terms["lookup"].seconds == pytest.approx(5 * US)


def test_weights_are_read_at_a_rate_of_their_own():
    memory = {"bytes": 1, "read_bytes_per_second": 1e12, "copy_bytes_per_second": 1e12}
    for rate, seconds in ((None, 5e-4), (5e11, 1e-3)):
        hardware = machine(device_memory={**memory, "weights_bytes_per_second": rate})
        cost = step_cost(hardware, GEOMETRY, TRAFFIC, weights_bytes=5e8, offload="none")
        assert cost.projections.seconds == pytest.approx(seconds)


def test_the_attention_reads_tokens_and_the_bus_carries_tokens():
    traffic = replace(SPARSE, attended_bytes=2e6, fetched_bytes=1e6)
    found = stage_features(GEOMETRY.layer(0), traffic, 3, "cpu")
    assert found["attend"] == Features(6e6, 2e6 / 64 / 2)
    assert found["id_copy"] == Features(3 * 2e6 / 64 * 8, 150)
    assert found["fetch"].bytes == 3e6 and found["update"].bytes == 6e6
    assert found["choose"].entries == 150**2 and found["lookup"] == Features(0.0, 150)
    assert stage_features(GEOMETRY.layer(0), SPARSE, 3, "cpu")["fetch"].bytes == 9e6


def test_stages_that_have_nothing_to_do_do_not_occur():
    layer = GEOMETRY.layer(0)
    assert set(stage_features(layer, LayerTraffic(exact_bytes=100.0), 1, "cpu")) == {"attend", "append"}
    assert stage_features(layer, DENSE, 3, "cpu")["attend"].bytes == 150_000


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"batch": 0}, "the batch must be 1 or more, not 0"),
        ({}, {"offload": "disk"}, "unknown offload 'disk'"),
        ({"host_to_device": None}, {}, "'plain' has no link between host and device"),
    ],
)
def test_bad_input(changes, options, message):
    with pytest.raises(InputError, match=message):
        step_cost(machine(**changes), GEOMETRY, TRAFFIC, **options)
    with pytest.raises(InputError, match="traffic of 2 layers does not fit a model of 3"):
        step_cost(machine(), GEOMETRY, TRAFFIC[:2])
