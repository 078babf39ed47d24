"""The fused engine against the generic one: same logits, same accesses; its step as a graph on a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from runtime_model import SAMPLE, live_plan, loaded_tiny, random_ids, single

pytest.importorskip("triton")
from kvtune.errors import InputError
from kvtune.models import attention_through, cached
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.runtime.engine import Engine, EngineOptions, open_engine
from kvtune.runtime.fused_decoder import FusedDecoder
from kvtune.runtime.live import live
from kvtune.runtime.torch_engine import TorchEngine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT, ANSWER = random_ids(1250, 1), random_ids(3, 2)
WAVE = Plan(get_policy("wave_index", {"retrieval": 0.05, "segment": 512}), dense_layers=(0,))


@pytest.fixture(scope="module")
def loaded():
    return loaded_tiny(DEVICE)


def both(loaded, plan, offload: str = "none") -> tuple[Engine, Engine]:
    options = EngineOptions(cache_fraction=0.1, longest=1300, offload=offload)
    return open_engine("fused", loaded, plan, options), open_engine("torch", loaded, plan, options)


def talk(engine: Engine) -> tuple[list[torch.Tensor], list]:
    """A question, an answer, going back, another question and answer after a turn."""
    logits, logs = [], []
    with engine:
        engine.start()
        engine.feed(CONTEXT)
        engine.build()
        base = engine.mark()
        for question in (random_ids(7, 8), random_ids(1, 9)):
            engine.rewind(base)
            engine.feed(question)
            asked = engine.mark()
            with engine.full_attention():
                logits.append(engine.step(5))
            engine.rewind(asked)
            logits += [engine.step(token) for token in ANSWER]
            logs.append((engine.access_log(), engine.hit_masks(), engine.counters()))
        engine.feed(random_ids(6, 11))
        logits.append(engine.logits.float())
        logits.append(engine.step(ANSWER[0]))
        keys, values = engine.keys_values(1, 1249)
        logits += [keys, values]
    return logits, logs


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_the_fused_engine_does_what_the_generic_one_does(loaded, offload):
    fused, plain = both(loaded, WAVE, offload)
    got, logs = talk(fused)
    want, plain_logs = talk(plain)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    for (log, hits, counters), (plain_log, plain_hits, plain_counters) in zip(logs, plain_logs, strict=True):
        assert log.units.keys() == {unit for unit, a in plain_log if len(a.blocks)}
        for unit, accesses in log:
            for name in ("offsets", "blocks", "pages", "tokens", "truncated"):
                assert np.array_equal(getattr(accesses, name), getattr(plain_log.units[unit], name)), name
            assert hits[unit] == plain_hits[unit]
        assert counters == plain_counters
    assert fused.offload == offload
    assert (fused.held_bytes().host > 0) == (offload == "cpu") or not fused.built


def test_offload_without_effect_is_said(loaded):
    engine = open_engine("fused", loaded, live_plan("quest"), EngineOptions(0.1, 1300, "cpu"))
    assert engine.offload == "none" and "--offload cpu has no effect" in engine.notes[0]
    assert not open_engine("fused", loaded, WAVE, EngineOptions(0.1, 1300, "cpu")).notes


@pytest.mark.parametrize("case", ["streaming", "full"])
def test_ranges_of_tokens(loaded, case):
    plan = live_plan(case)
    fused, plain = both(loaded, plan)
    for mine, theirs in zip(talk(fused)[0], talk(plain)[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_windowed_layer_stays_dense_in_its_window():
    windowed = loaded_tiny(DEVICE, windows=(None, 40, None))
    fused, _ = both(windowed, WAVE)
    with fused:
        fused.start()
        fused.feed(CONTEXT)
        fused.step(4)
        assert fused.held_bytes().full_kv == 2 * (1251 + 40 + 1251) * 2 * 8 * 4
    assert [type(layer).__name__ for layer in fused_layers(windowed)] == [
        "RangeLayer",
        "RangeLayer",
        "FusedWave",
    ]


def fused_layers(loaded):
    decoder = FusedDecoder(loaded, WAVE, new_tokens=4)
    geometry = loaded.geometry
    keys = torch.randn(geometry.n_kv_heads, 1200, geometry.head_dim, device=DEVICE)
    decoder.start(lambda layer, sequence: (keys, keys), [1200])
    return decoder.layers


def test_a_batch_of_ragged_sequences_decodes_as_each_alone(loaded):
    prompts = [random_ids(1250, 1), random_ids(1100, 5)]
    tokens = [random_ids(2, 6), random_ids(2, 7)]
    caches, alone = [], []
    for prompt, answer in zip(prompts, tokens):
        with TorchEngine(loaded, WAVE, EngineOptions(0.1, 1300)) as engine:
            engine.start()
            engine.feed(prompt)
            caches.append([tuple(part.clone() for part in engine.keys_values(layer)) for layer in range(3)])
            alone.append([engine.step(token) for token in answer])
    decoder = FusedDecoder(loaded, WAVE, new_tokens=8)
    with attention_through(loaded.model, decoder):
        decoder.start(lambda layer, sequence: caches[sequence][layer], [1250, 1100])
        for step in range(2):
            logits = decoder.step([answer[step] for answer in tokens])
            for sequence in range(2):
                torch.testing.assert_close(logits[sequence], alone[sequence][step], rtol=1e-3, atol=1e-4)


def test_live_through_the_fused_engine(loaded):
    sample = single(SAMPLE, 0)
    found = {
        name: live(loaded, [sample], WAVE, cache_fraction=0.1, decode=2, engine=name, free=False)
        for name in ("fused", "torch")
    }
    assert found["fused"]["engine"] == "fused" and found["fused"]["replay_equal"]
    assert found["fused"]["kl"]["mean"] == pytest.approx(found["torch"]["kl"]["mean"], rel=1e-2)
    assert found["fused"]["hit_ratio"] == found["torch"]["hit_ratio"]
    assert found["fused"]["forecast_hit_ratio"]["forced"]["page"] == pytest.approx(
        found["torch"]["forecast_hit_ratio"]["forced"]["page"], abs=1e-3
    )


def test_what_has_no_kernels_is_refused(loaded):
    with pytest.raises(InputError, match="no kernels for policy 'magicpig'"):
        open_engine("fused", loaded, live_plan("magicpig"), EngineOptions(0.1, 1300))
    biased = dataclasses.replace(loaded, geometry=dataclasses.replace(loaded.geometry, n_heads=2 * 17))
    with pytest.raises(InputError, match="17 query heads"):
        open_engine("fused", biased, WAVE, EngineOptions(0.1, 1300))


def test_full_attention_is_the_models_own(loaded):
    fused, _ = both(loaded, WAVE)
    with fused:
        fused.start()
        fused.feed(CONTEXT)
        with fused.full_attention():
            got = fused.step(9)
            keys, _ = cached(fused._session.cache, 0)
    assert keys.shape[1] == 1251
    ids = torch.tensor([[*CONTEXT, 9]], device=DEVICE)
    with torch.no_grad():
        want = loaded.model(ids).logits[0, -1]
    torch.testing.assert_close(got, want.float(), rtol=1e-3, atol=1e-4)
    assert len(fused.timings.full_steps) == 1
