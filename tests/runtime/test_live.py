"""The live run on a tiny model: what it reports, and the forced tokens behind it."""

from __future__ import annotations

import json

import pytest
import torch
from runtime_model import CONTEXT, SAMPLE, loaded_tiny, single, tiny_model

from kvtune.errors import InputError
from kvtune.models import feed, new_cache
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.runtime import apply_profile, live
from kvtune.runtime.decoding import full_pass
from kvtune.runtime.engine import EngineOptions
from kvtune.runtime.torch_engine import TorchEngine

KEYS = {
    "engine", "offload", "notes", "policy", "params", "dense_layers", "windowed_layers", "cache_fraction",
    "interrupted", "requests", "answers", "decode_steps", "kl", "delta_nll", "top1", "hit_ratio",
    "replayed_hit_ratio", "predicted_terms_ms", "predicted_hidden_ms",
    "replay_equal", "forecast_hit_ratio", "truncations", "tokens_per_second", "full_tokens_per_second",
    "prefill_ms", "index_build_ms", "step_ms", "full_step_ms", "predicted_step_ms", "stages_ms", "gpu_bytes",
    "host_bytes", "bytes_are", "score", "per_turn", "batch",
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded():
    return loaded_tiny()


@pytest.fixture(scope="module")
def document(loaded):
    return live(loaded, [SAMPLE], get_policy("wave_index", {"retrieval": 0.1}), cache_fraction=0.2, decode=8)


def test_document_has_the_stable_keys(document):
    found = json.loads(json.dumps(document, allow_nan=False))
    assert set(found) == KEYS
    assert set(found["kl"]) == {"mean", "p95"} and set(found["delta_nll"]) == {"mean", "low", "high"}
    assert found["answers"] == 3 and found["requests"] == 2 and found["decode_steps"] == 24
    assert set(found["gpu_bytes"]) == {"cache", "index", "buffers", "steady", "total", "full_kv"}
    for name in ("step_ms", "full_step_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p95"]
    assert found["predicted_step_ms"] is None and found["predicted_terms_ms"] is None
    assert found["interrupted"] is False


def test_replay_equals_the_live_counters(document):
    assert document["replay_equal"] is True
    assert document["replayed_hit_ratio"] == pytest.approx(document["hit_ratio"], abs=0)
    assert 0 < document["hit_ratio"]["page"] < 1


def test_sparse_attention_costs_something(document):
    assert document["kl"]["mean"] > 1e-6


@pytest.mark.parametrize("policy", ["full", "wave_index", "oracle_topk"])
def test_lossless_settings_cost_nothing(loaded, policy):
    lossless = get_policy(policy, type(get_policy(policy)).lossless(2000))
    document = live(loaded, [SAMPLE], lossless, decode=6)
    assert abs(document["kl"]["mean"]) < 1e-5 and document["top1"] == 1.0
    assert abs(document["delta_nll"]["mean"]) < 1e-3


def test_dense_layers_alone_equal_full_attention(loaded):
    plan = Plan(get_policy("streaming", {"recent": 4}), dense_layers=(0, 1, 2))
    document = live(loaded, [SAMPLE], plan, decode=4)
    assert document["kl"]["mean"] == pytest.approx(0, abs=1e-7)
    assert document["hit_ratio"] == {"request": None, "page": None, "token": None}
    assert document["replay_equal"] is None


def test_windowed_layers_are_named(document):
    assert document["windowed_layers"] == []
    hybrid = loaded_tiny(windows=(30, None, 30))
    found = live(hybrid, [single(SAMPLE, 1)], "streaming", decode=2, free=False, forecast=False)
    assert found["windowed_layers"] == [0, 2] and found["dense_layers"] == []


def test_full_pass_forces_the_reference_and_then_follows_the_model(loaded):
    """Teacher-forced logits equal those of one whole forward pass over the same tokens."""
    turns = SAMPLE.requests[0].turns
    with TorchEngine(loaded, Plan(get_policy("full")), EngineOptions(0.1, 1400)) as engine:
        engine.feed([*CONTEXT, *turns[0].question_ids])
        with engine.full_attention():
            answers = full_pass(engine, SAMPLE.requests[0], 8)
    assert answers[0].tokens[:5] == turns[0].reference_ids and answers[1].tokens[:3] == turns[1].reference_ids
    assert [len(a.tokens) for a in answers] == [8, 8]
    sequence = [
        *CONTEXT,
        *turns[0].question_ids,
        *answers[0].tokens,
        *turns[1].question_ids,
        *answers[1].tokens,
    ]
    whole = feed(loaded.model, torch.tensor(sequence), new_cache(), keep=8)
    assert torch.allclose(whole, answers[1].logits, atol=2e-3)
    banned = list(loaded.eos_ids)
    greedy = [int(row.index_fill(0, torch.tensor(banned), -torch.inf).argmax()) for row in whole[2:7]]
    assert list(answers[1].tokens[3:]) == greedy


def test_bad_input(loaded):
    with pytest.raises(InputError, match="outside"):
        live(loaded, [SAMPLE], cache_fraction=0.0)
    with pytest.raises(InputError, match="--decode"):
        live(loaded, [SAMPLE], decode=0)
    with pytest.raises(InputError, match="no request"):
        live(loaded, [])
    with pytest.raises(InputError, match="unknown engine"):
        live(loaded, [SAMPLE], engine="warp")
    with pytest.raises(InputError, match="--offload is none or cpu"):
        live(loaded, [SAMPLE], offload="disk")
    with pytest.raises(InputError, match="evicts"):
        live(loaded, [SAMPLE], "h2o")
    with pytest.raises(InputError, match="longest timeline"):
        live(loaded_tiny(max_positions=100), [SAMPLE])


def exported(path, **changes):
    data = {
        "kvtune_runtime": 1,
        "policy": "wave_index",
        "parameters": {"retrieval": 0.1},
        "overrides": {"1": {"retrieval": 0.3}},
        "dense_layers": [0],
        "cache": {"policy": "wave", "fraction": 0.1},
    }
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_exported_profile_runs_under_generate(tmp_path):
    model = tiny_model()
    sequence = apply_profile(model, exported(tmp_path / "profile.json"))
    prompt = torch.tensor([CONTEXT])
    model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert sequence.layer(0).dense and sequence.layer(0).index is None
    assert sequence.layer(1).policy.retrieval == 0.3 and sequence.layer(2).policy.retrieval == 0.1
    assert sequence.layer(2).caches[0].counters.requests[1] > 0


def test_exported_profile_that_does_not_fit_is_refused(tmp_path):
    model = tiny_model()
    with pytest.raises(InputError, match="names layer 7"):
        apply_profile(model, exported(tmp_path / "a.json", dense_layers=[7]))
    with pytest.raises(InputError, match="not a profile"):
        apply_profile(model, exported(tmp_path / "b.json", kvtune_runtime=9))
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        apply_profile(model, tmp_path / "c.json")
    with pytest.raises(InputError, match="cannot be read"):
        apply_profile(model, tmp_path / "none.json")
