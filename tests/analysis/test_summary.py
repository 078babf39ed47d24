from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvtune.analysis.claims import claims
from kvtune.analysis.metrics import Observations
from kvtune.analysis.statistics import bootstrap_interval
from kvtune.analysis.summary import MIN_SAMPLES, Summary, bytes_per_step, measures


def seen(metric, values, turns=None, lag=None):
    values = torch.tensor(values, dtype=torch.float32)
    turns = torch.zeros(len(values), dtype=torch.long) if turns is None else torch.tensor(turns)
    return Observations(metric, values, turns, lag)


def filled(samples=2, **metrics):
    """A summary of layers 0…3 in which each metric has the given value (or value by layer) everywhere."""
    summary = Summary()
    for sample in range(samples):
        for layer in range(4):
            found = []
            for name, value in metrics.items():
                metric, _, lag = name.partition("__")
                number = value[layer] if isinstance(value, list) else value
                found.append(seen(metric, [[number]], lag=int(lag) if lag else None))
            summary.add(sample, layer, found)
    return summary


def test_means_and_quantiles_run_over_everything_or_one_layer():
    summary = Summary()
    values = np.random.default_rng(1).random((3, 5, 2)).astype(np.float32)
    for layer in range(3):
        summary.add(0, layer, [seen("error", values[layer].tolist(), turns=[0, 0, 1, 1, 1])])
    whole = measures(summary)["output_error"]
    assert whole["mean"] == pytest.approx(values.mean())
    assert whole["p95"] == pytest.approx(np.quantile(values, 0.95))
    assert measures(summary, 2)["output_error"]["p50"] == pytest.approx(np.median(values[2]))
    assert summary.of_turn("error", 1).mean == pytest.approx(values[:, 2:].mean())
    assert summary.turns() == [0, 1]


def test_bytes_add_up_over_layers_and_heads():
    summary = filled(read_bytes=[10, 20, 30, 40], scan_bytes=1, full_read_bytes=100)
    assert bytes_per_step(summary, kv_heads=3)["read_bytes_per_step"] == 3 * 100
    assert bytes_per_step(summary, kv_heads=3, layer=2) == {
        "read_bytes_per_step": 90,
        "scan_bytes_per_step": 3,
        "full_read_bytes_per_step": 300,
    }


def test_intervals_resample_samples_and_need_five():
    few, enough = Summary(seed=3), Summary(seed=3)
    values = [[[float(sample)], [float(sample) / 2]] for sample in range(MIN_SAMPLES)]
    for sample, rows in enumerate(values):
        enough.add(sample, 0, [seen("error", rows)])
        if sample:
            few.add(sample, 0, [seen("error", rows)])
    assert few.interval("error") is None
    assert "low" not in measures(few)["output_error"]
    sums = [sum(row[0] for row in rows) for rows in values]
    expected = bootstrap_interval(sums, [2] * MIN_SAMPLES, seed=3)
    assert enough.interval("error") == expected
    assert (measures(enough)["output_error"]["low"], measures(enough)["output_error"]["high"]) == expected


def test_what_was_not_measured_is_nan():
    document = measures(Summary())
    assert math.isnan(document["output_error"]["mean"])
    assert document["query_cosine"] == {}


def verdict(summary, words):
    found = [claim for claim in claims(summary) if words in claim["claim"]]
    assert len(found) == 1
    return found[0]["holds"]


@pytest.mark.parametrize(
    ("words", "holding", "failing"),
    [
        ("cosine above", {"query_cosine__1": 0.86}, {"query_cosine__1": 0.84}),
        (
            "adjacent steps share",
            {"overlap__1": 0.6, "overlap_chance__1": 0.1},
            {"overlap__1": 0.4, "overlap_chance__1": 0.1},
        ),
        (
            "20 steps apart",
            {"overlap__20": 0.4, "overlap_chance__20": 0.1},
            {"overlap__20": 0.5, "overlap_chance__20": 0.1},
        ),
        (
            "first two layers",
            {"token_share_95": [0.4, 0.3, 0.1, 0.1]},
            {"token_share_95": [0.4, 0.05, 0.1, 0.1]},
        ),
        (
            "neighbouring layers",
            {"layer_overlap": 0.3, "layer_overlap_chance": 0.1},
            {"layer_overlap": 0.15, "layer_overlap_chance": 0.1},
        ),
        ("tokens after the prompt", {"late_mass": 0.2}, {"late_mass": 0.02}),
        (
            "recall@100",
            {"recall_index": 0.9, "effective_tokens": 100.0, "visible_tokens": 4000.0},
            {"recall_index": 0.5, "effective_tokens": 2000.0, "visible_tokens": 4000.0},
        ),
        (
            "estimation zone",
            {"error": 0.1, "error_without_estimation": 0.2},
            {"error": 0.3, "error_without_estimation": 0.2},
        ),
    ],
)
def test_each_claim_can_hold_and_fail(words, holding, failing):
    assert verdict(filled(**holding), words) is True
    assert verdict(filled(**failing), words) is False


def test_claims_that_chance_or_a_small_budget_decides_have_no_verdict():
    crowded = filled(overlap__1=0.99, overlap_chance__1=0.9, layer_overlap=0.99, layer_overlap_chance=0.9)
    assert verdict(crowded, "adjacent steps share") is None
    assert verdict(crowded, "neighbouring layers") is None
    small = filled(recall_index=0.5, effective_tokens=200.0, visible_tokens=4000.0)
    assert verdict(small, "recall@100") is None


def test_growth_over_turns_compares_the_last_turn_with_the_first():
    for last, holds in ((0.21, True), (0.25, False)):
        summary = Summary()
        summary.add(0, 0, [seen("error", [[0.2], [0.9], [last]], turns=[0, 1, 2])])
        assert verdict(summary, "over turns") is holds
    assert claims(Summary()) == []


def test_only_layers_with_an_estimation_zone_count_for_its_claim():
    summary = filled(error=[0.0, 0.5, 0.5, 0.5])
    summary.add(0, 1, [seen("error_without_estimation", [[0.8]])])
    found = next(claim for claim in claims(summary) if "estimation" in claim["claim"])
    assert found["value"] == pytest.approx(1 - 0.5 / 0.8)
