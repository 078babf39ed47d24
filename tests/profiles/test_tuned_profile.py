"""From a tuning result to a profile."""

from __future__ import annotations

import pytest
import torch

from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.profiles import parse_profile
from kvtune.profiles.io import to_yaml
from kvtune.profiles.strict_yaml import load_yaml
from kvtune.profiles.tuned import profile_of
from kvtune.traces import TraceWriter, open_trace
from kvtune.tuning import Candidate, Score, TuneResult, shipped_default


@pytest.fixture
def trace(profile, tmp_path):
    """Two samples of one turn each, one layer of one head, six tokens."""
    geometry = profile.geometry.to_model()
    header = {
        "model": "tiny",
        "fingerprint": "beef",
        "geometry": geometry.to_dict(),
        "dtype": "bfloat16",
        "layers": [0],
        "kv_heads": [0],
        "values": True,
        "rope": {"override": "yarn:4", "length": None},
        "workload": {"name": "niah_single", "context": 4},
    }
    writer = TraceWriter(tmp_path / "tiny.trace", header)
    vectors = torch.ones(1, 4, 64, dtype=torch.bfloat16)
    for number in range(2):
        with writer.sample(number) as sample:
            context = sample.segment(
                kind="context", request=-1, turn=-1, parent=-1, start=0, token_ids=range(4)
            )
            answer = sample.segment(
                kind="generated", request=0, turn=0, parent=context, start=4, token_ids=range(2)
            )
            sample.keys_values(0, context, vectors, vectors)
            sample.keys_values(0, answer, vectors[:, :2], vectors[:, :2])
            queries = torch.ones(2, 4, 64, dtype=torch.bfloat16)
            sample.queries(0, answer, [4, 5], [0, 1], 0, queries)
            sample.record(0, 0, "niah_single", "reference", "generated", None)
    writer.finish()
    return open_trace(tmp_path / "tiny.trace")


def result(chosen: Candidate, **changes) -> TuneResult:
    score = Score(0.05, 0.2, 1000.0, 0.9, (0.04, 0.05, 0.06), (990.0, 1010.0))
    fields = {
        "chosen": chosen,
        "default": shipped_default(),
        "search": {"chosen": score, "default": score},
        "held_out": {"chosen": score, "default": score},
        "intervals": {
            "error_mean": (0.05, 0.04, 0.06),
            "error_p95": (0.2, 0.15, 0.3),
            "read_bytes_per_step": (1000.0, 990.0, 1010.0),
            "hit_ratio": (0.9, 0.85, 0.95),
        },
        "difference": {"value": 0.0, "low": -0.01, "high": 0.01},
        "trials": 12,
        "winner": "tie",
        "context_tokens": (900, 1000),
        "search_samples": (0,),
        "held_out_samples": (1,),
        "document": {},
    }
    return TuneResult(**{**fields, **changes})


def wave(**parameters) -> Candidate:
    plan = Plan(get_policy("wave_index", parameters), (0,), {2: {"retrieval": 0.1}})
    return Candidate(plan, 0.07)


def test_settings_evidence_and_origin_are_carried_over(trace):
    profile = profile_of(result(wave(retrieval=0.03)), trace, seed=5)
    assert (profile.model.id, profile.model.fingerprint) == ("tiny", "beef")
    assert profile.model.rope is not None and profile.model.rope.override == "yarn:4"
    assert (profile.context_length.min, profile.context_length.max) == (900, 1000)
    assert profile.policy.parameters["retrieval"] == 0.03
    assert profile.overrides == {2: {"retrieval": 0.1}}
    assert profile.dense_layers == (0,)
    assert profile.cache is not None and profile.cache.fraction == 0.07
    assert profile.geometry.to_model() == trace.geometry
    assert profile.workload is not None
    assert (profile.workload.task, profile.workload.samples) == ("niah_single", 2)
    assert (profile.workload.requests, profile.workload.turns, profile.workload.decode_steps) == (1, 1, 2)
    assert profile.workload.settings == {"name": "niah_single", "context": 4}
    assert profile.held_out is not None and profile.held_out.winner == "tie"
    assert profile.held_out.default.parameters["tokens_per_centroid"] == 16
    assert (profile.provenance.seed, profile.provenance.trials) == (5, 12)
    assert profile.provenance.trace == "tiny.trace"
    assert parse_profile(load_yaml(to_yaml(profile), "p")) == profile


def test_predictions_carry_their_intervals_and_the_layers_measured(trace):
    predicted = profile_of(result(wave()), trace, seed=0).predicted
    assert predicted is not None
    assert predicted.output_error.p95.model_dump() == {"value": 0.2, "low": 0.15, "high": 0.3}
    assert predicted.read_bytes_per_step.low == 990.0
    assert predicted.hit_ratio is not None and predicted.hit_ratio.value == 0.9
    assert predicted.layers == (0,)


def test_without_a_cache_there_is_no_hit_ratio(trace):
    intervals = {key: (1.0, 1.0, 1.0) for key in ("error_mean", "error_p95", "read_bytes_per_step")}
    score = Score(0.05, 0.2, 1000.0, None, (0.05,), (1000.0,))
    scores = {"chosen": score, "default": score}
    profile = profile_of(result(wave(), intervals=intervals, search=scores), trace, seed=0)
    assert profile.predicted is not None and profile.predicted.hit_ratio is None
    assert profile.cache is None


@pytest.mark.parametrize("count", [1, 7, 333, 999, 1000])
def test_budgets_in_tokens_scale_with_the_context(trace, count):
    plan = Plan(get_policy("streaming", {"recent": count, "sink": 4}), (), {1: {"recent": 2 * count}})
    profile = profile_of(result(Candidate(plan, 0.05)), trace, seed=0)
    assert profile.resolve(1000).layer(0) == ("streaming", {"sink": 4, "recent": count})
    assert profile.resolve(1000).layer(1)[1]["recent"] == 2 * count
    assert profile.resolve(10_000).layer(0)[1]["recent"] == 10 * count
