"""The forecast from full attention's queries, against the slow way and against the live run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runtime_model import CONTEXT, LIVE, SAMPLE, live_plan, loaded_tiny, random_ids, single

from kvtune.analysis.evaluate import access_log
from kvtune.caching import simulate
from kvtune.capturing import capture
from kvtune.models import LoadedModel
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.runtime import live
from kvtune.runtime.decoding import full_pass
from kvtune.runtime.engine import EngineOptions
from kvtune.runtime.forecast import QueryRecorder, forecast_log, sparse_layers
from kvtune.runtime.torch_engine import TorchEngine
from kvtune.traces import open_trace
from kvtune.workloads import Request, Turn


@pytest.fixture(scope="module")
def loaded():
    return loaded_tiny()


def recorded_and_ready(engine, request, steps):
    """Full attention's steps of ``request``, and the engine with the index in front of them."""
    engine.feed(request.turns[0].question_ids)
    asked, start = engine.mark(), engine.length
    recorder = QueryRecorder(sparse_layers(engine))
    with engine.full_attention():
        full_pass(engine, request, steps, recorder)
    taken = recorder.take(engine, start)
    engine.rewind(asked)
    engine.build()
    return taken, start


@pytest.mark.parametrize("case", sorted(set(LIVE) - {"full"}))
def test_all_steps_at_once_are_the_steps_one_by_one(loaded, case):
    """The forecast's log is what the policy selects when tokens arrive one at a time."""
    plan = live_plan(case)
    with TorchEngine(loaded, plan, EngineOptions(0.1, 1400)) as engine:
        engine.feed(CONTEXT)
        taken, start = recorded_and_ready(engine, SAMPLE.requests[0], 40)
        log = forecast_log(engine, taken, (3, 5), start)
        steps, policy, index = taken[1], plan.policy, engine.index(1)
        known, wanted = start, [[], []]
        for query, position in zip(steps.queries, steps.positions):
            new = slice(known - start, int(position) + 1 - start)
            positions = torch.arange(known, int(position) + 1)
            policy.append(index, steps.keys[:, new], steps.values[:, new], positions)
            chosen = policy.select(index, query.view(1, 2, 3, 8), position[None])
            known = int(position) + 1
            for head in (0, 1):
                blocks = [] if chosen.blocks is None else chosen.blocks[0, head].tolist()
                wanted[head].append([block for block in blocks if block >= 0])
    for head in (0, 1):
        unit = log.units[3, 5, 1, head]
        found = [unit.blocks[a:b].tolist() for a, b in zip(unit.offsets, unit.offsets[1:])]
        assert found == wanted[head] and unit.context_tokens == start
    assert len(found) == 80, "two turns of 40 steps"


def test_it_is_the_simulation_of_a_captured_trace(loaded, tmp_path):
    """capture → simulate on the same tokens gives the same hit ratios."""
    from tiny_models import GivenSamples, tiny_tokenizer

    named = LoadedModel(loaded.model, tiny_tokenizer(), loaded.geometry, "tiny", "f00d", "")
    request = Request((Turn("q", random_ids(9, 4), "a", random_ids(30, 5)),))
    sample = single(SAMPLE)
    sample = type(sample)("given", sample.context_ids, (request,))
    capture(named, GivenSamples([sample]), tmp_path / "t", decode=30, force=True)
    policy = get_policy("wave_index", {"retrieval": 0.1})
    (expected,) = simulate(access_log(open_trace(tmp_path / "t"), policy), [0.1], "wave")
    document = live(loaded, [sample], policy, cache_fraction=0.1, decode=30, free=False)
    found = document["forecast_hit_ratio"]["forced"]
    assert {unit: found[unit] for unit in ("page", "request", "token")} == expected.hit_ratio.to_dict()
    live_ratio = document["hit_ratio"]
    assert found["live"] == live_ratio
    assert found["difference_points"] == pytest.approx(100 * (live_ratio["page"] - found["page"]))


def test_a_lossless_run_is_forecast_exactly(loaded):
    """Nothing is approximated, so the live queries are full attention's (up to rounding)."""
    lossless = get_policy("oracle_topk", {"tokens": 2000})
    document = live(loaded, [SAMPLE], lossless, cache_fraction=0.2, decode=6)
    for kind in ("forced", "free"):
        found = document["forecast_hit_ratio"][kind]
        assert found["page"] == pytest.approx(found["live"]["page"], abs=1e-9)


def test_without_accesses_there_is_no_ratio(loaded):
    found = live(loaded, [SAMPLE], live_plan("streaming"), decode=3)["forecast_hit_ratio"]["forced"]
    assert found["page"] is None and found["difference_points"] is None
    dense = Plan(get_policy("quest"), dense_layers=(0, 1, 2))
    assert live(loaded, [SAMPLE], dense, decode=3)["forecast_hit_ratio"]["forced"]["page"] is None


def test_dense_layers_have_no_part_in_it(loaded):
    plan = Plan(get_policy("wave_index", {"retrieval": 0.1}), dense_layers=(1,))
    with TorchEngine(loaded, plan, EngineOptions(0.1, 1400)) as engine:
        assert sparse_layers(engine) == [0, 2]
        engine.feed(CONTEXT)
        taken, start = recorded_and_ready(engine, SAMPLE.requests[0], 3)
        log = forecast_log(engine, taken, (0, 0), start)
    assert {layer for _, _, layer, _ in log.units} == {0, 2}
    assert all(np.all(unit.pages > 0) for unit in log.units.values())
