"""Sensitivity of heads to KV precisions, against float64 loops; the plan against brute force."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.analysis.evaluate import decode_queries, evaluate
from kvtune.analysis.head_errors import CASES, head_errors
from kvtune.analysis.mixed_plan import mixed_plan, native_heads, plan_precisions, propose
from kvtune.analysis.sensitivity import SENSITIVITY, SENSITIVITY_PAGE, sensitivity
from kvtune.attention import reference_attention
from kvtune.errors import InputError, TraceError
from kvtune.policies import get_policy
from kvtune.quantisation import get_precision
from kvtune.traces import open_trace

NAMES = ("fp8", "fp8_unscaled", "int8", "int4", "kivi2", "native")


@pytest.fixture(scope="module")
def timeline(tiny_trace):
    return open_trace(tiny_trace).timelines(0)[0]


@pytest.fixture(scope="module")
def document(tiny_trace):
    return sensitivity(tiny_trace)


def slow_errors(layer, name, case, calibrated):
    """Errors [T, Hq]: each step has a cache of its own, attended in float64."""
    precision, steps = get_precision(name), decode_queries(layer)
    queries = layer.queries[layer.decode]
    rows = []
    for t, position in enumerate(steps.positions.tolist()):
        keys, values = layer.keys[:, : position + 1], layer.values[:, : position + 1]
        held_keys = keys if case == "values" else precision.round_trip(keys, "keys", calibrated)
        held_values = values if case == "keys" else precision.round_trip(values, "values", calibrated)
        at = (steps.positions[t : t + 1], layer.key_positions[: position + 1], layer.info)
        exact = reference_attention(queries[t : t + 1], keys, values, *at)[0]
        own = reference_attention(queries[t : t + 1], held_keys, held_values, *at)[0]
        rows.append((own - exact).norm(dim=-1) / exact.norm(dim=-1))
    return torch.stack(rows)


@pytest.mark.parametrize("number", [0, 2])
def test_head_errors_equal_a_slow_reference(timeline, number):
    layer = timeline.layer(number)
    found = head_errors(layer, NAMES, timeline.prompt_length)
    assert set(found) == {(name, case) for name in NAMES for case in CASES}
    for (name, case), errors in found.items():
        expected = slow_errors(layer, name, case, timeline.prompt_length)
        assert torch.allclose(errors.flatten(1).double(), expected, atol=3e-5), (name, case)


def test_it_equals_the_full_policy_on_a_quantised_cache(timeline):
    layer = timeline.layer(1)
    found = head_errors(layer, ("int4", "kivi2"), timeline.prompt_length)
    for name in ("int4", "kivi2"):
        full = evaluate(get_policy("full"), layer, timeline.prompt_length, precision=name)
        assert torch.allclose(found[name, "both"].flatten(1), full.error, atol=1e-5)


def test_means_and_ranking_are_those_of_the_errors(tiny_trace, document):
    trace = open_trace(tiny_trace)
    errors = {name: {} for name in document["precisions"]}
    for sample in range(trace.n_samples):
        for timeline in trace.timelines(sample):
            for number in trace.layers:
                layer = timeline.layer(number)
                found = head_errors(layer, list(errors), timeline.prompt_length)
                for (name, case), values in found.items():
                    for head in (0, 1):
                        errors[name].setdefault((number, head, case), []).append(values[:, head].flatten())
    assert list(document["precisions"]) == ["fp8", "int8", "int4", "kivi2"]
    for name, entry in document["precisions"].items():
        for case, reported in (("both", "output_error"), ("keys", "keys"), ("values", "values")):
            every = torch.cat([torch.cat(v) for key, v in errors[name].items() if key[2] == case]).double()
            assert entry[reported]["mean"] == pytest.approx(float(every.mean()), rel=1e-5)
            assert entry[reported]["p95"] == pytest.approx(float(every.quantile(0.95)), rel=1e-5)
        heads = [head for head in document["heads"] if head["precision"] == name]
        assert len(heads) == 6
        assert [h["output_error"] for h in heads] == sorted((h["output_error"] for h in heads), reverse=True)
        for head in heads:
            for case, reported in (("both", "output_error"), ("keys", "keys"), ("values", "values")):
                own = torch.cat(errors[name][head["layer"], head["kv_head"], case]).double()
                assert head[reported] == pytest.approx(float(own.mean()), rel=1e-5)


def test_documented_keys_are_there(document):
    assert {"precisions", "heads", "plan"} <= set(document)
    for entry in document["precisions"].values():
        assert set(entry["output_error"]) == {"mean", "p95"}
    assert {"layer", "kv_head", "precision", "output_error"} <= set(document["heads"][0])
    json.dumps(document, allow_nan=False)


def test_the_plan_comes_true(tiny_trace):
    document = sensitivity(tiny_trace, ["kivi2"], native_share=0.34)
    plan, trace = document["plan"], open_trace(tiny_trace)
    assert len(plan["native_heads"]) == 3
    ranked = [(head["layer"], head["kv_head"]) for head in document["heads"]]
    assert [(head["layer"], head["kv_head"]) for head in plan["native_heads"]] == ranked[:3]
    precision = plan_precisions(plan)
    errors = [
        evaluate(get_policy("full"), timeline.layer(n), timeline.prompt_length, precision=precision).error
        for sample in range(trace.n_samples)
        for timeline in trace.timelines(sample)
        for n in trace.layers
    ]
    assert plan["output_error"]["mixed"] == pytest.approx(float(torch.cat(errors).mean()), rel=1e-4)
    mean = document["precisions"]["kivi2"]["output_error"]["mean"]
    assert plan["output_error"]["uniform"] == pytest.approx(mean, rel=1e-12)
    assert plan["drop"] == pytest.approx(1 - plan["output_error"]["mixed"] / plan["output_error"]["uniform"])
    # 8 float32 channels: a key takes 8 × (8 + 8) / 32 bytes, a value 2 + 8; half the heads are native.
    assert plan["bytes_per_token"] == {"native": 64, "uniform": 14, "mixed": 39}


@given(
    errors=st.lists(st.floats(0, 1).map(lambda x: round(x, 3)), min_size=1, max_size=7),
    target=st.integers(0, 100).map(lambda x: x / 100),
)
@settings(max_examples=100, deadline=None)
def test_a_target_keeps_the_fewest_heads_that_reach_it(errors, target):
    by_head = {(place, 0): error for place, error in enumerate(errors)}
    kept = native_heads(by_head, target_drop=target)
    wanted = target * sum(errors)
    reaching = [
        size
        for size in range(len(errors) + 1)
        for some in itertools.combinations(errors, size)
        if sum(some) >= wanted - 1e-9
    ]
    assert len(kept) == min(reaching)
    assert sum(by_head[head] for head in kept) >= wanted - 1e-9


@pytest.mark.parametrize(
    ("share", "heads", "count"),
    [(0.1, 90, 9), (0.1, 6, 1), (0.0, 6, 0), (1.0, 6, 6), (0.34, 3, 2), (0.1, 30, 3)],
)
def test_a_share_of_heads_is_rounded_up(share, heads, count):
    kept = native_heads({(place, 1): 1.0 for place in range(heads)}, share)
    assert kept == [(place, 1) for place in range(count)]


def test_the_cheapest_plan_within_the_error_is_proposed():
    errors = {"a": 0.01, "b": 0.08, "c": 0.5}
    plans = [
        mixed_plan(name, {(0, 0): error, (0, 1): error}, [], 256, size)
        for (name, error), size in zip(errors.items(), (128, 80, 40))
    ]
    assert propose(plans, 0.1)["precision"] == "b"
    assert propose(plans, 0.6)["precision"] == "c"
    none = propose(plans, 0.001)
    assert none["precision"] == "a" and not none["within_max_error"]
    assert [plan["precision"] for plan in none["alternatives"]] == ["b", "c"]


def test_a_plan_without_loss_drops_nothing():
    assert mixed_plan("native", {(0, 0): 0.0}, [], 256, 256)["drop"] == 0


def test_files_are_written_and_never_overwritten_silently(tiny_trace, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    options = {"precisions": ["int4"], "layers": [0], "out": tmp_path}
    document = sensitivity(tiny_trace, **options)
    written = json.loads((tmp_path / SENSITIVITY).read_text())
    assert written["heads"] == document["heads"] and written["layers"] == [0]
    assert "<svg" in (tmp_path / SENSITIVITY_PAGE).read_text()
    with pytest.raises(InputError, match="exists"):
        sensitivity(tiny_trace, **options)
    sensitivity(tiny_trace, **options, overwrite=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"summary.json", SENSITIVITY, SENSITIVITY_PAGE}


def test_bad_input_is_refused(tiny_trace, make_trace, tmp_path):
    cases = [
        ({"precisions": ["int3"]}, "unknown precision 'int3'"),
        ({"precisions": []}, "no precision"),
        ({"layers": [7]}, "layer 7"),
        ({"native_share": 1.5}, "native share"),
        ({"target_drop": -0.1}, "target drop"),
        ({"target_drop": math.nan}, "target drop"),
    ]
    for options, words in cases:
        with pytest.raises(InputError, match=words):
            sensitivity(tiny_trace, **options)
    with pytest.raises(InputError, match="no values"):
        sensitivity(make_trace(tmp_path / "keys", samples=1, with_values=False))
    with pytest.raises(TraceError, match="layer 0, head 1, position 30 is NaN"):
        sensitivity(make_trace(tmp_path / "nan", samples=1, poison=30))
