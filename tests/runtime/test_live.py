"""The live run on a tiny model: what it reports, and the forced tokens behind it."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from runtime_model import GEOMETRY, tiny_model

from kvtune.capturing.loop import Session
from kvtune.errors import InputError
from kvtune.models import LoadedModel, feed, new_cache
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.runtime import apply_profile, live
from kvtune.runtime.decoding import full_pass
from kvtune.workloads import Request, Sample, Turn

GENERATOR = torch.Generator().manual_seed(3)


def ids(n):
    return tuple(torch.randint(3, 97, (n,), generator=GENERATOR).tolist())


CONTEXT = ids(1250)
SAMPLE = Sample(
    "tiny",
    CONTEXT,
    (
        Request((Turn("q", ids(20), "a", ids(5)), Turn("q", ids(9), "a", ids(3)))),
        Request((Turn("q", ids(1), None, ()),)),
    ),
)


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(), None, GEOMETRY, "tiny", "f00d", "")


@pytest.fixture(scope="module")
def document(loaded):
    return live(loaded, [SAMPLE], get_policy("wave_index", {"retrieval": 0.1}), cache_fraction=0.2, decode=8)


def test_document_has_the_stable_keys(document):
    text = json.dumps(document, allow_nan=False)
    wanted = {"kl", "delta_nll", "top1", "hit_ratio", "replayed_hit_ratio", "tokens_per_second"}
    assert wanted | {"full_tokens_per_second"} <= set(json.loads(text))
    assert set(document["kl"]) == {"mean", "p95"} and set(document["delta_nll"]) == {"mean", "low", "high"}
    assert document["answers"] == 3 and document["requests"] == 2 and document["decode_steps"] == 24


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


def test_full_pass_forces_the_reference_and_then_follows_the_model(loaded):
    """Teacher-forced logits equal those of one whole forward pass over the same tokens."""
    session = Session(loaded)
    session.feed(CONTEXT)
    answers = full_pass(session, SAMPLE.requests[0], 8)
    turns = SAMPLE.requests[0].turns
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
    short = LoadedModel(loaded.model, None, dataclasses.replace(GEOMETRY, max_positions=100), "t", "f", "")
    with pytest.raises(InputError, match="longest timeline"):
        live(short, [SAMPLE])


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
