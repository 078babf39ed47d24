"""A hybrid model through the whole line: sliding layers stay dense in their window, the others are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import WINDOW, GivenSamples, tiny_loaded, tokens, toy_workload

from kvtune.analysis import analyze
from kvtune.caching import simulate
from kvtune.capturing import capture
from kvtune.models import LoadedModel
from kvtune.policies import get_policy
from kvtune.runtime import live
from kvtune.traces import Trace, open_trace
from kvtune.workloads import Request, Sample, Turn

CONTEXT, DECODE = 180, 6
QUEST = {"token_budget": 48, "page_size": 8}


@pytest.fixture(scope="module")
def gemma3() -> LoadedModel:
    """Layers 0 and 2 slide, layer 1 sees everything."""
    return tiny_loaded("gemma3")


@pytest.fixture(scope="module")
def trace(gemma3: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path: Path = tmp_path_factory.mktemp("hybrid") / "t"
    capture(gemma3, toy_workload(samples=1, requests=1, turns=1, context=CONTEXT), path, decode=DECODE)
    return open_trace(path)


def sample() -> Sample:
    return Sample("given", tokens(CONTEXT), (Request((Turn("why", tokens(5, 1), None),)),))


@pytest.mark.parametrize("name", ["quest", "oracle_topk", "streaming", "snapkv"])
def test_a_policy_serves_the_other_layers_alone(trace: Trace, name: str):
    document = analyze(trace, name)
    assert [(layer["window"], layer["policy"]) for layer in document["layers"]] == [
        (WINDOW, "full"), (None, name), (WINDOW, "full")
    ]  # fmt: skip
    assert document["windowed_layers"] == [0, 2]
    for layer in (0, 2):
        measured = document["layers"][layer]
        assert measured["output_error"]["mean"] < 1e-5 and measured["recall_at_100"]["attention"] == 1.0
        assert measured["read_bytes_per_step"] == measured["full_read_bytes_per_step"]
    assert document["output_error"] == document["layers"][1]["output_error"]


def test_bytes_of_a_sliding_layer_are_those_of_its_window(trace: Trace):
    document = analyze(trace, "full")
    page = trace.geometry.layer(0).page_bytes
    heads = trace.geometry.n_kv_heads
    assert document["layers"][0]["full_read_bytes_per_step"] == heads * page * -(-WINDOW // 8)
    assert document["layers"][1]["full_read_bytes_per_step"] > heads * page * (CONTEXT // 8)


def test_a_sliding_layer_asks_nothing_of_the_cache(trace: Trace):
    (result,) = simulate(trace, [0.1], policy="quest", settings=QUEST, keep_hits=True)
    asked = {unit[2] for unit, found in result.units.items() if found.tally.accesses.any()}
    assert asked == {1}


def test_a_live_run_serves_the_other_layers_alone(gemma3: LoadedModel):
    document: dict[str, Any] = live(
        gemma3, [sample()], get_policy("quest", QUEST), cache_fraction=0.2, decode=DECODE
    )
    assert document["replay_equal"] is True and 0 < document["hit_ratio"]["page"] < 1
    assert document["kl"]["mean"] > 1e-7
    lossless = get_policy("quest", type(get_policy("quest")).lossless(CONTEXT + 20))
    exact = live(gemma3, [sample()], lossless, decode=DECODE)
    assert abs(exact["kl"]["mean"]) < 1e-6 and exact["top1"] == 1.0


def test_what_is_resident_of_a_sliding_layer_is_its_window(gemma3: LoadedModel):
    """Of layer 1 all tokens, of the two others the window."""
    document = live(gemma3, [sample()], "full", decode=DECODE)
    token = gemma3.geometry.layer(0).token_bytes * gemma3.geometry.n_kv_heads
    length = CONTEXT + 5 + DECODE - 1
    assert document["gpu_bytes"]["steady"] == pytest.approx((length + 2 * WINDOW) * token, abs=token)


def test_a_workload_of_several_turns_runs_on_it(gemma3: LoadedModel):
    turns = tuple(Turn(f"question {i}", tokens(4, i), "w5 w6", (5, 6)) for i in range(3))
    given = Sample("given", tokens(CONTEXT), (Request(turns),))
    document = live(
        gemma3,
        [given],
        get_policy("quest", QUEST),
        decode=DECODE,
        workload=GivenSamples([given]),
    )
    assert [row["turn"] for row in document["per_turn"]] == [0, 1, 2]
    assert document["replay_equal"] is True
