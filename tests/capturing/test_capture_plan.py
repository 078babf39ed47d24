"""A capture's size is known before it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import GivenSamples, tiny_loaded, toy_workload

from kvtune.capturing import CapturePlan, capture
from kvtune.capturing.options import CaptureOptions
from kvtune.capturing.plan import plan_capture, samples_digest
from kvtune.traces import open_trace
from kvtune.workloads import Sample


def given(workload: GivenSamples) -> list[Sample]:
    return list(workload.samples(None, None, 1, 1, 1, 0))


@pytest.mark.parametrize(
    "options",
    [
        {"force": True},
        {"force": True, "prompt_queries": None, "layers": [1], "kv_heads": [0]},
        {"force": True, "values": False, "prompt_queries": 5},
        {"decode": 6},
        {"decode": 6, "keep_answers": True},
    ],
    ids=str,
)
def test_the_plan_is_what_is_written(tmp_path: Path, options: dict):
    loaded = tiny_loaded()
    loaded.model.generation_config.eos_token_id = []
    loaded.tokenizer.eos_token = None  # answers are as long as they may get
    plans: list[CapturePlan] = []
    workload = toy_workload(samples=2, context=120)
    document = capture(loaded, workload, tmp_path / "t", announce=plans.append, **options)
    (plan,) = plans
    trace = open_trace(tmp_path / "t")
    longest = max(len(timeline.token_ids) for s in range(2) for timeline in trace.timelines(s))
    assert plan.longest == longest
    for name in ("samples", "requests", "units", "tokens", "decode_steps"):
        assert getattr(plan, name) == document[name], name
    assert sum(plan.sample_tokens) == plan.tokens and sum(plan.sample_bytes) == plan.bytes


def test_bytes_are_those_of_the_vectors():
    loaded = tiny_loaded()
    samples = given(toy_workload(samples=1, context=200_000, requests=1, turns=1))
    choice = CaptureOptions(prompt_queries=1000, decode=10).choice(loaded.geometry)
    plan = plan_capture(samples, loaded.geometry, choice)
    layers, heads, q_heads, dim = 3, 2, 6, 8
    keys = (200_000 + 4 + 10) * heads * 2 * dim * 4
    queries = (1000 + 4 + 10) * q_heads * dim * 4
    assert plan.bytes == pytest.approx(layers * (keys + queries), rel=0.02)


def test_digests_tell_prompts_apart():
    samples = given(toy_workload(samples=2))
    first, second = samples
    variants = [
        samples,
        [second, first],
        [first],
        [replace(first, context_ids=first.context_ids[:-1]), second],
        [replace(first, requests=first.requests[:1]), second],
    ]
    assert len({samples_digest(variant) for variant in variants}) == len(variants)
    assert samples_digest(samples) == samples_digest(given(toy_workload(samples=2)))
