"""A trace's conversations run again on its model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_loaded, toy_workload

from kvtune.analysis import compare
from kvtune.capturing import capture
from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.runtime import live, traced
from kvtune.runtime.traced import TracedRuns, traced_sample
from kvtune.traces import open_trace


@pytest.fixture(scope="module")
def llama():
    return tiny_loaded("llama")


@pytest.fixture(scope="module")
def trace(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced") / "t"
    capture(llama, toy_workload(samples=2, requests=2, turns=2), folder, decode=6)
    return open_trace(folder)


@pytest.fixture
def runs(trace, llama, monkeypatch):
    monkeypatch.setattr(traced, "load_model", lambda *args, **options: llama)
    return TracedRuns(trace, 1)


@pytest.mark.parametrize("sample", [0, 1])
def test_context_questions_and_fed_back_answers_are_the_workloads(trace, sample):
    """The last answer is the model's own: no reference was fed back after it."""
    given = list(toy_workload(samples=2, requests=2, turns=2).samples(None, None, 2, 2, 2, 0))[sample]
    found = traced_sample(trace, sample)
    assert found.context_ids == given.context_ids
    assert len(found.requests) == len(given.requests) == 2
    for made, request in zip(found.requests, given.requests):
        assert [turn.question_ids for turn in made.turns] == [turn.question_ids for turn in request.turns]
        assert made.turns[0].reference_ids == request.turns[0].reference_ids
        assert len(made.turns[1].reference_ids) == 6


def test_the_tokens_are_those_of_the_timelines(trace):
    found = traced_sample(trace, 0)
    longest = [max((t for t in trace.timelines(0) if t.request == r), key=len) for r in (0, 1)]
    for request, timeline in zip(found.requests, longest):
        ids = [*found.context_ids]
        for turn in request.turns:
            ids += [*turn.question_ids, *turn.reference_ids]
        assert torch.equal(torch.tensor(ids), timeline.token_ids)


def test_full_attention_has_no_divergence_and_a_window_has(runs):
    assert runs(get_policy("full"))["kl"]["mean"] < 1e-6
    assert runs(get_policy("streaming", {"sink": 0, "recent": 4}))["kl"]["mean"] > 1e-3


def test_it_is_the_live_run_of_these_samples(runs, trace, llama):
    policy = get_policy("streaming", {"recent": 9})
    expected = live(llama, [traced_sample(trace, 0)], policy, decode=1)
    assert runs(policy) == {name: expected[name] for name in ("kl", "delta_nll", "top1")}


def test_live_rows_of_a_comparison(runs, trace):
    document = compare(
        trace, ["streaming", "snapkv"], {"snapkv": {"window": 4}}, target_bytes=9000, live=runs
    )
    found = {row["name"]: row for row in document["policies"]}
    assert found["full"]["kl"]["mean"] < 1e-6 < found["streaming"]["kl"]["mean"]
    assert "kl" not in found["snapkv"] and "evicts" in found["snapkv"]["note"]


@pytest.mark.parametrize("count", [0, 3])
def test_only_samples_that_the_trace_holds(trace, count):
    with pytest.raises(InputError, match="--live must lie in 1…2"):
        TracedRuns(trace, count)


def test_another_model_under_the_same_name_is_refused(trace, llama, monkeypatch):
    other = replace(llama, fingerprint="0000")
    monkeypatch.setattr(traced, "load_model", lambda *args, **options: other)
    with pytest.raises(InputError, match="another 'tiny-llama'"):
        TracedRuns(trace, 1)


@pytest.mark.model
def test_on_the_packaged_model(smollm2_trace, tmp_path):
    """At equal bytes on real text: live KL and trace error agree that full attention is best."""
    trace = open_trace(smollm2_trace)
    document = compare(
        trace, ["streaming"], layers=list(trace.layers)[:2], target_bytes=100_000, live=TracedRuns(trace, 1)
    )
    found = {row["name"]: row for row in document["policies"]}
    assert found["full"]["kl"]["mean"] < 1e-4 < found["streaming"]["kl"]["mean"]
