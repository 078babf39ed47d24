"""An index built beside the prefill is the one built after it, layer by layer, and nothing waits for it."""

from __future__ import annotations

import pytest
import torch
from fused_case import DEVICE
from runtime_model import live_plan, loaded_tiny, random_ids

pytest.importorskip("triton")
from kvtune.capturing import loop
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.runtime.build_beside import BuildBeside
from kvtune.runtime.engine import EngineOptions, open_engine
from kvtune.runtime.fused_decoder import FusedDecoder
from kvtune.runtime.fused_engine import FusedEngine

CONTEXT, QUESTION = random_ids(1160, 1), random_ids(90, 2)
PLANS = {
    "wave_index": Plan(get_policy("wave_index", {"retrieval": 0.05, "segment": 512}), dense_layers=(0,)),
    "quest": live_plan("quest"),
    "ctkvr": live_plan("ctkvr"),
}


@pytest.fixture(scope="module")
def loaded():
    return loaded_tiny(DEVICE)


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of 64 tokens: the question is fed in two."""
    monkeypatch.setattr(loop, "chunk_length", lambda total: 64)


def opened(loaded, name: str, offload: str = "none") -> FusedEngine:
    engine = open_engine("fused", loaded, PLANS[name], EngineOptions(0.1, 1300, offload))
    assert isinstance(engine, FusedEngine)
    return engine


def answered(engine: FusedEngine, beside: bool) -> list:
    """Logits and accesses of a step, a reference pass between the build and it."""
    # A wave index is dense until 1,024 tokens lie outside the steady zone.
    context = CONTEXT if engine.plan.policy.name == "wave_index" else CONTEXT[-200:]
    with engine:
        engine.start()
        engine.feed(context)
        engine.feed(QUESTION, then_build=beside)
        if not beside:
            engine.build()
        ready = engine.mark()
        with engine.full_attention():
            full = engine.step(5)
            engine.rewind(ready)
        assert engine.built and engine.length == len(context) + len(QUESTION)
        step = engine.step(7)
        blocks = [accesses.blocks.tolist() for _, accesses in engine.access_log()]
        return [full, step, blocks, engine.hit_masks()]


@pytest.mark.parametrize(
    ("name", "offload"), [("wave_index", "none"), ("wave_index", "cpu"), ("quest", "none"), ("ctkvr", "none")]
)
def test_it_decodes_as_one_built_after_the_prefill(loaded, chunks, name, offload):
    beside, after = (answered(opened(loaded, name, offload), kind) for kind in (True, False))
    exact = DEVICE == "cpu"
    for mine, theirs in zip(beside[:2], after[:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-4)
    if exact:
        assert beside[2:] == after[2:]


def test_each_layer_is_built_within_the_last_chunk_before_the_next_one_attends(loaded, chunks, monkeypatch):
    engine, seen = opened(loaded, "quest"), []
    build_layer, see = FusedDecoder.build_layer, FusedEngine._see

    def building(self, number, *rest):
        seen.append(("build", number, engine._session.length))
        build_layer(self, number, *rest)

    def seeing(self, number, queries, length):
        seen.append(("attend", number, length))
        see(self, number, queries, length)

    monkeypatch.setattr(FusedDecoder, "build_layer", building)
    with engine:
        engine.feed(CONTEXT)
        monkeypatch.setattr(FusedEngine, "_see", seeing)
        engine.feed(QUESTION, then_build=True)
    assert seen[:3] == [("attend", number, 1224) for number in range(3)]
    assert seen[3:] == [
        step for number in range(3) for step in (("attend", number, 1250), ("build", number, 1224))
    ]


def test_times_are_of_the_prefill_and_of_what_is_left(loaded):
    engine = opened(loaded, "quest")
    with engine:
        engine.feed(CONTEXT)
        engine.feed(QUESTION, then_build=True)
        times = engine.timings
        assert len(times.prefill) == 2 and len(times.index_build) == 1
        assert min(*times.prefill, *times.index_build) > 0


def test_an_index_is_built_once_and_not_within_full_attention(loaded):
    engine = opened(loaded, "quest")
    with engine:
        engine.feed(QUESTION)
        empty = engine.mark()
        with engine.full_attention(), pytest.raises(ValueError, match="full attention"):
            engine.feed(QUESTION, then_build=True)
        engine.feed(QUESTION, then_build=True)
        with pytest.raises(ValueError, match="built already"):
            engine.feed(QUESTION, then_build=True)
        engine.rewind(empty)
        assert not engine.built and engine.length == 90


def test_a_prefill_that_fails_leaves_no_index(loaded, monkeypatch):
    engine = opened(loaded, "quest")

    def fails(self, number, *rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(FusedDecoder, "build_layer", fails)
    with engine:
        with pytest.raises(KeyboardInterrupt):
            engine.feed(QUESTION, then_build=True)
        assert not engine.built and engine._beside is None


def test_layers_come_in_order_and_those_left_out_are_built_at_the_end(loaded):
    geometry = loaded.geometry
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(geometry.n_kv_heads, 100, geometry.head_dim, generator=generator).to(DEVICE)
    decoder = FusedDecoder(loaded, PLANS["quest"], new_tokens=4)
    decoder.prepare([100])
    beside = BuildBeside(decoder, lambda layer, sequence: (keys, keys))
    with beside.layer(0):
        assert not decoder.layers
    with pytest.raises(ValueError, match="layer 1 is to be built next, not 2"), beside.layer(2):
        pass
    beside.join()
    assert len(decoder.layers) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "offload"), [("wave_index", "none"), ("wave_index", "cpu"), ("quest", "none"), ("ctkvr", "none")]
)
def test_no_layers_build_waits_for_the_device(loaded, name, offload):
    geometry = loaded.geometry
    keys = torch.randn(geometry.n_kv_heads, 1250, geometry.head_dim, device="cuda")
    queries = torch.randn(geometry.n_kv_heads, geometry.group, 50, geometry.head_dim, device="cuda")
    decoder = FusedDecoder(loaded, PLANS[name], new_tokens=4, offload=offload, log_steps=4)
    for _ in range(2):  # the first compiles kernels
        decoder.prepare([1250])
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number in range(geometry.n_layers):
                decoder.build_layer(number, lambda *_: (keys, keys), lambda *_: queries)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        decoder.finish()
