"""The generic engine: the protocol, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_model import LIVE, live_plan, loaded_tiny, random_ids

from kvtune.caching import simulate
from kvtune.errors import InputError
from kvtune.models import feed, new_cache
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.runtime.engine import EngineOptions, engine_names, open_engine
from kvtune.runtime.torch_engine import TorchEngine

CONTEXT = random_ids(1250, 1)
QUESTIONS = random_ids(9, 2), random_ids(1, 3)
ANSWERS = random_ids(12, 4), random_ids(14, 5)
OPTIONS = EngineOptions(cache_fraction=0.1, longest=1300)


@pytest.fixture(scope="module")
def loaded():
    return loaded_tiny()


def answer(engine, request):
    """Logits and log of a request from where the engine stands."""
    engine.feed(QUESTIONS[request])
    logits = torch.stack([engine.step(token) for token in ANSWERS[request]])
    return logits, engine.access_log(), engine.hit_masks(), engine.counters()


def same_logs(one, other):
    return one.units.keys() == other.units.keys() and all(
        np.array_equal(getattr(a, name), getattr(other.units[unit], name))
        for unit, a in one
        for name in ("offsets", "blocks", "pages", "tokens")
    )


@pytest.mark.parametrize("case", sorted(LIVE))
def test_requests_over_one_context_do_not_meet(loaded, case):
    """Two requests that fork from one index give, bit for bit, what each gives alone."""
    alone = []
    with TorchEngine(loaded, live_plan(case), OPTIONS) as engine:
        for request in (0, 1):
            engine.start()
            engine.feed(CONTEXT)
            engine.build()
            alone.append(answer(engine, request))
    with TorchEngine(loaded, live_plan(case), OPTIONS) as engine:
        engine.start()
        engine.feed(CONTEXT)
        engine.build()
        base = engine.mark()
        for request in (0, 1, 0):
            engine.rewind(base)
            logits, log, hits, counters = answer(engine, request)
            assert torch.equal(logits, alone[request][0])
            assert same_logs(log, alone[request][1])
            assert hits == alone[request][2] and counters == alone[request][3]
        assert len(engine.timings.index_build) == 1


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(3, 96)),
        st.tuples(st.just("feed"), st.lists(st.integers(3, 96), min_size=1, max_size=9)),
        st.tuples(st.just("full"), st.lists(st.integers(3, 96), min_size=1, max_size=3)),
        st.tuples(st.sampled_from(["mark", "rewind"]), st.integers(0, 3)),
    ),
    max_size=14,
)


def play(engine, path):
    """Run ``path`` (feeds and steps) from a fresh prompt, and what one more step says."""
    engine.start()
    engine.feed(CONTEXT[:70])
    engine.build()
    for name, argument in path:
        (engine.step if name == "step" else engine.feed)(argument)
    return engine.step(50), engine.access_log()


@settings(max_examples=25)
@given(operations=OPERATIONS)
@pytest.mark.parametrize("case", ["quest_small", "ctkvr_dynamic", "clusterkv"])
def test_going_back_is_as_if_the_branch_had_never_been(loaded, case, operations):
    """Whatever was fed, decoded, marked and forgotten: what counts is the path that is left."""
    small = {"quest_small": ("quest", {"token_budget": 24, "page_size": 8})}
    plan = Plan(get_policy(*small[case])) if case in small else live_plan(case)
    with TorchEngine(loaded, plan, EngineOptions(0.2, 80)) as engine:
        engine.feed(CONTEXT[:70])
        engine.build()
        path: list[tuple[str, object]] = []
        marks = [(engine.mark(), [])]
        for name, argument in operations:
            if name == "mark":
                marks.append((engine.mark(), list(path)))
            elif name == "rewind":
                mark, there = marks[argument % len(marks)]
                engine.rewind(mark)
                # Behind an earlier place, later ones are gone.
                path, marks = list(there), marks[: argument % len(marks) + 1]
            elif name == "full":
                here = engine.mark()
                with engine.full_attention():
                    for token in argument:
                        engine.step(token)
                engine.rewind(here)
            else:
                (engine.step if name == "step" else engine.feed)(argument)
                path.append((name, argument))
        found, log = engine.step(50), engine.access_log()
        expected, wanted = play(engine, path)
    assert torch.equal(found, expected) and same_logs(log, wanted)


def test_full_attention_is_the_models_own_and_leaves_no_trace(loaded):
    with TorchEngine(loaded, live_plan("wave_index"), OPTIONS) as engine:
        engine.feed(CONTEXT)
        engine.build()
        base = engine.mark()
        expected = answer(engine, 0)
        engine.rewind(base)
        with engine.full_attention():
            engine.feed(QUESTIONS[1])
            full = torch.stack([engine.step(token) for token in ANSWERS[1]])
        with pytest.raises(ValueError, match="rewound"):
            engine.step(5)
        assert len(engine.timings.full_steps) == len(ANSWERS[1])
        engine.rewind(base)
        got = answer(engine, 0)
    assert torch.equal(got[0], expected[0]) and same_logs(got[1], expected[1])
    ids = torch.tensor([*CONTEXT, *QUESTIONS[1], *ANSWERS[1]])
    whole = feed(loaded.model, ids, new_cache(), keep=len(ANSWERS[1]))
    assert torch.allclose(full, whole, atol=2e-3)


def test_an_index_is_built_at_the_first_step_or_when_told(loaded):
    with TorchEngine(loaded, live_plan("ctkvr"), OPTIONS) as engine:
        engine.feed(CONTEXT)
        assert not engine.built
        asked = engine.mark()
        late = torch.stack([engine.step(token) for token in ANSWERS[0]])
        engine.rewind(asked)
        assert not engine.built
        engine.build()
        assert engine.built and engine.length == len(CONTEXT)
        assert torch.equal(torch.stack([engine.step(token) for token in ANSWERS[0]]), late)
        with pytest.raises(ValueError, match="built"):
            engine.build()


def test_queries_are_shown_from_a_position_on(loaded):
    shown = []
    with TorchEngine(loaded, live_plan("streaming"), OPTIONS) as engine:
        with engine.showing(lambda *seen: shown.append(seen), first=1240):
            engine.feed(CONTEXT)
        engine.step(5)
    assert {layer for layer, _, _ in shown} == {0, 1, 2}
    assert [(position, tuple(q.shape)) for layer, position, q in shown if layer == 1] == [(1240, (10, 6, 8))]


def test_the_index_handed_out_is_the_callers(loaded):
    with TorchEngine(loaded, live_plan("quest"), OPTIONS) as engine:
        engine.feed(CONTEXT)
        engine.build()
        base = engine.mark()
        expected = answer(engine, 0)[0]
        engine.rewind(base)
        policy, taken = live_plan("quest").policy, engine.index(1)
        policy.append(taken, torch.ones(2, 90, 8), torch.ones(2, 90, 8), torch.arange(90))
        assert torch.equal(answer(engine, 0)[0], expected)


def most_pages(log, layer):
    """The most pages that a step of a layer retrieves, over both kv heads."""
    units = [log.units[0, 0, layer, head] for head in (0, 1)]
    steps = range(units[0].steps)
    return max(sum(u.pages[u.offsets[s] : u.offsets[s + 1]].sum() for u in units) for s in steps)


def test_bytes_are_counted_by_hand(loaded):
    plan = Plan(get_policy("wave_index", {"retrieval": 0.1, "segment": 512}), dense_layers=(2,))
    with TorchEngine(loaded, plan, OPTIONS) as engine:
        engine.feed(CONTEXT)
        engine.build()
        for token in ANSWERS[0]:
            engine.step(token)
        held, index = engine.held_bytes(), engine.index(0)
        log = engine.access_log()
    length, token = 1250 + len(ANSWERS[0]), 2 * 8 * 4
    assert held.counted and held.full_kv == 3 * 2 * length * token
    assert held.cache == 2 * 2 * round(0.1 * 1250 / 8) * 8 * token
    assert held.host == 2 * 2 * length * token
    clusters = index.clusters.sizes.shape[1]
    assert held.index == 2 * 2 * clusters * (2 * 8 * 4 + 4)
    resident = 4 + 64 + len(ANSWERS[0])
    assert held.steady == 2 * 2 * -(-resident // 8) * 8 * token + 2 * length * token
    assert held.buffers == sum(most_pages(log, layer) for layer in (0, 1)) * 8 * token
    assert held.total == held.cache + held.index + held.buffers + held.steady


def test_windowed_layers_keep_their_window(loaded):
    """Full attention would keep no more of them, whatever the plan."""
    windowed = loaded_tiny(windows=(40, None, 5000))
    length, token = 1250, 2 * 8 * 4
    for name in ("full", "wave_index"):
        with TorchEngine(windowed, live_plan(name), OPTIONS) as engine:
            engine.feed(CONTEXT)
            engine.build()
            held = engine.held_bytes()
        assert held.full_kv == 2 * (40 + 2 * length) * token
        assert held.steady >= 2 * (40 + length) * token
    assert held.total < held.full_kv


def test_counters_agree_with_the_masks_and_the_replay(loaded):
    with TorchEngine(loaded, live_plan("wave_index"), OPTIONS) as engine:
        engine.feed(CONTEXT)
        _, log, hits, counters = answer(engine, 0)
    (replay,) = simulate(log, [0.1], "wave")
    assert counters["request"] == (sum(map(sum, hits.values())), sum(map(len, hits.values())))
    assert counters["page"][0] / counters["page"][1] == replay.hit_ratio.page
    assert 0 < replay.hit_ratio.page < 1


def test_stages_are_timed_on_a_cpu(loaded):
    with TorchEngine(loaded, live_plan("wave_index"), OPTIONS) as engine:
        engine.feed(CONTEXT)
        engine.step(5)
        assert set(engine.timings.stages) == {"append", "select", "cache", "attend"}
        assert sum(engine.timings.stages.values()) <= engine.timings.steps[0]


def test_unknown_engines_and_offload(loaded):
    with pytest.raises(InputError, match="unknown engine 'tourch'"):
        open_engine("tourch", loaded, live_plan("quest"), OPTIONS)
    assert {"auto", "torch"} <= set(engine_names())
    engine = open_engine("torch", loaded, live_plan("quest"), EngineOptions(0.1, 1300, "cpu"))
    assert engine.offload == "none" and "no effect" in engine.notes[0]
