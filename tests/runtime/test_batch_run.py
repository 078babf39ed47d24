"""Several sequences decoded together beside a live run: as each alone, with what they hold and take."""

from __future__ import annotations

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime_model import GEOMETRY, loaded_tiny, random_ids

pytest.importorskip("triton")
from kvtune.errors import InputError
from kvtune.hardware import step_cost
from kvtune.models import cached
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.profiles.hardware_presets import load_hardware
from kvtune.runtime import batch_run
from kvtune.runtime.batch_run import BatchRun, same_share
from kvtune.runtime.engine import EngineOptions
from kvtune.runtime.fused_engine import FusedEngine
from kvtune.runtime.greedy_steps import Decoded
from kvtune.runtime.live import live
from kvtune.runtime.measurements import CachePass, LiveRun
from kvtune.runtime.prompt_batch import PromptBatch, prefill
from kvtune.runtime.room import WORKING_BYTES, check_batch
from kvtune.runtime.step_prediction import StepPredictor, live_traffic, weights_read
from kvtune.runtime.sweep import sweep
from kvtune.runtime.torch_engine import TorchEngine
from kvtune.workloads import Request, Sample, Turn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CTKVR = {"top_k": 3, "rho": 20, "n_centroids": 8, "sink": 2, "local": 4, "query_window": 32}
PLANS = {
    "streaming": Plan(get_policy("streaming", {"sink": 2, "recent": 20})),
    "ctkvr": Plan(get_policy("ctkvr", CTKVR), dense_layers=(0, 2)),
    "wave_index": Plan(get_policy("wave_index"), dense_layers=(0, 2)),
}
PLAN = PLANS["streaming"]
STEPS = 2


def sample(context: int, question: int, seed: int) -> Sample:
    turn = Turn("q", random_ids(question, seed + 1), None, ())
    return Sample("tiny", random_ids(context, seed), (Request((turn,)),))


SAMPLES = [sample(60, 5, 1), sample(81, 3, 11)]
PROMPTS = [(*s.context_ids, *s.requests[0].turns[0].question_ids) for s in SAMPLES]
LENGTHS = [65, 84]


@pytest.fixture(scope="module")
def loaded():
    return loaded_tiny(DEVICE)


@pytest.fixture
def measured(loaded):
    """``measured(size)``: a run of which nothing but the batch was done."""

    def call(size: int, plan: Plan = PLAN, offload: str = "none", predict=None) -> LiveRun:
        run = LiveRun(CachePass(0.2), CachePass(0.2), engine={"notes": [], "offload": offload})
        BatchRun(loaded, plan, size, tuple(PROMPTS), STEPS, 0.2, offload).measure(run, predict, None)
        return run

    return call


@pytest.fixture
def run(loaded):
    """``run(batch=2)``: a live run of both samples by the kernels, a step an answer."""

    def call(**options):
        fixed = {"cache_fraction": 0.2, "decode": 1, "free": False, "forecast": False, "engine": "fused"}
        return live(loaded, SAMPLES, PLAN, **{**fixed, **options})

    return call


@pytest.fixture
def decoded(monkeypatch) -> list:
    """The tokens of each decoder of a batch, in turn: those of one sequence, then the batch's."""
    found, original = [], batch_run.greedy_steps

    def kept(*arguments):
        result = original(*arguments)
        found.append(result.tokens.tolist())
        return result

    monkeypatch.setattr(batch_run, "greedy_steps", kept)
    return found


def greedy(loaded, plan: Plan, prompt: tuple[int, ...]) -> list[int]:
    """The tokens behind the first, by the policy's own code."""
    with TorchEngine(loaded, plan, EngineOptions(0.2, 100)) as engine:
        engine.start()
        engine.feed(prompt)
        tokens = [int(engine.logits.argmax())]
        for _ in range(STEPS):
            tokens.append(int(engine.step(tokens[-1]).argmax()))
    return tokens[1:]


@pytest.mark.parametrize("name", ["streaming", "ctkvr"])
def test_a_ragged_batch_decodes_as_each_sequence_alone(loaded, measured, decoded, name):
    batch = measured(2, PLANS[name]).batch
    alone = [greedy(loaded, PLANS[name], prompt) for prompt in PROMPTS]
    dense = [greedy(loaded, Plan(get_policy("full")), prompt) for prompt in PROMPTS]
    assert alone[0] != alone[1] and all(one != other for one, other in zip(alone, dense))
    assert decoded == [[alone[0]], [alone[1]], alone]
    assert batch["same_tokens"] == 1.0 and batch["lengths"] == LENGTHS


def test_what_is_measured(measured):
    found = measured(3)
    batch, notes = found.batch, found.engine["notes"]
    assert set(batch) == {
        "size", "lengths", "step_ms", "full_step_ms", "tokens_per_second", "full_tokens_per_second",
        "gpu_bytes", "host_bytes", "same_tokens", "predicted_step_ms", "graph",
    }  # fmt: skip
    assert batch["size"] == 3 and batch["lengths"] == [65, 84, 65]
    assert "the batch of 3 takes 2 prompts in turn" in notes
    assert set(batch["gpu_bytes"]) == {"cache", "index", "buffers", "steady", "total", "full_kv"}
    token = GEOMETRY.kv_bytes_per_token
    assert batch["gpu_bytes"]["full_kv"] == (sum(batch["lengths"]) + 3 * STEPS) * token
    assert batch["gpu_bytes"]["total"] > batch["gpu_bytes"]["full_kv"] and batch["host_bytes"] == 0
    assert batch["predicted_step_ms"] is None
    assert 0 < batch["step_ms"]["p50"] <= batch["step_ms"]["p95"]
    # Two steps: their median is their mean.
    assert batch["tokens_per_second"] == pytest.approx(3e3 / batch["step_ms"]["p50"])
    if DEVICE == "cpu":
        assert batch["graph"] is False and batch["full_step_ms"] == {"p50": None, "p95": None}
        assert batch["full_tokens_per_second"] is None
        assert any("full attention's step of the batch was not timed" in note for note in notes)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "offload"), [("streaming", "none"), ("wave_index", "cpu")])
def test_on_a_gpu_both_sides_are_graphs(measured, name, offload):
    batch = measured(3, PLANS[name], offload).batch
    assert batch["graph"] is True and batch["full_step_ms"]["p50"] > 0 and batch["same_tokens"] > 0
    assert batch["full_tokens_per_second"] > 0 and (batch["host_bytes"] > 0) == (offload == "cpu")


def test_full_attention_reads_as_many_keys_of_the_same_prompts(loaded, measured, monkeypatch):
    seen = []

    def timed(loaded, held, length, steps):
        seen.append((length, [layer.keys.clone() for layer in held.layers], steps))
        return [0.25] * steps

    monkeypatch.setattr(batch_run, "time_full_steps", timed)
    monkeypatch.setattr(batch_run, "greedy_steps", lambda *given: Decoded(torch.zeros(2, 1), [1.0]))
    batch = measured(2).batch
    ((length, keys, steps),) = seen
    assert length == 74 and steps == STEPS and batch["full_tokens_per_second"] == 8.0
    assert batch["full_step_ms"] == {"p50": 250.0, "p95": 250.0}
    for number, layer in enumerate(keys):
        assert layer.shape == (2, 2, 74, 8)
        first, second = (cached(prefill(loaded, PLAN, prompt).cache, number)[0] for prompt in PROMPTS)
        assert torch.equal(layer[0, :, :65], first) and not layer[0, :, 65:].any()
        assert torch.equal(layer[1], second[:, :74])


def test_full_attention_without_room_is_said(loaded, monkeypatch):
    made = BatchRun(loaded, PLAN, 2, tuple(PROMPTS), STEPS, 0.2, "cpu")
    held = PromptBatch(GEOMETRY, LENGTHS, torch.float32, torch.device("cpu"))
    needed = 2 * 74 * GEOMETRY.kv_bytes_per_token
    monkeypatch.setattr(batch_run, "time_full_steps", lambda *given: [1.0])
    for free, timed in ((needed, [1.0]), (needed - 1, [])):
        notes: list[str] = []
        monkeypatch.setattr(batch_run, "free_bytes", lambda device, free=free: free)
        assert made._full_steps(held, notes) == timed
        assert bool(notes) == (not timed) and all("no room for full attention's" in note for note in notes)


def test_prompts_are_handed_over_layer_by_layer(loaded):
    held = PromptBatch(GEOMETRY, [*LENGTHS, 65], torch.float32, torch.device("cpu"))
    first, second = (prefill(loaded, PLAN, prompt).cache for prompt in PROMPTS)
    held.put(0, first)
    held.put(1, second)
    held.repeat(2, 0)
    for number in range(3):
        for sequence, cache in enumerate((first, second, first)):
            given = held.take(number, sequence, torch.device("cpu"))
            for mine, theirs in zip(given, cached(cache, number), strict=True):
                assert torch.equal(mine, theirs.cpu())
        assert len(held.cut(10, torch.device("cpu")).layers) == 3 - number


def test_the_step_is_predicted_for_the_batch(loaded, run):
    predictor, kept = StepPredictor(load_hardware("h200"), loaded), []

    def predict(measured, plan, batch=1):
        kept.append((batch, live_traffic(measured, plan, loaded.geometry)))
        return predictor(measured, plan, batch)

    document = run(batch=3, forecast=True, predict=predict)
    (size, traffic), (one, _) = kept
    assert (size, one) == (3, 1)
    weights = weights_read(loaded)
    cost = step_cost(
        predictor.hardware, loaded.geometry, traffic, batch=3, weights_bytes=weights, offload="none"
    )
    assert document["batch"]["predicted_step_ms"] == 1e3 * cost.seconds > document["predicted_step_ms"]


def test_a_batch_that_cannot_be_predicted_has_no_prediction(measured):
    """Why is the run's own note."""

    def predict(*seen):
        raise InputError("nobody knows")

    found = measured(1, predict=predict)
    assert found.batch["predicted_step_ms"] is None and not any("nobody" in n for n in found.engine["notes"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_the_run_outlives_a_batch_that_does_not(run, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(batch_run, "greedy_steps", fail)
    document = run(batch=2)
    assert document["batch"] is None and document["answers"] == 2
    assert document["interrupted"] == (error is KeyboardInterrupt)
    ran_out = any("ran out of memory" in note for note in document["notes"])
    assert ran_out == (error is torch.OutOfMemoryError)


class Stopping:
    """Progress that stops the run after its first request."""

    @contextmanager
    def task(self, label, total):
        yield self

    def advance(self, n=1, note=""):
        raise KeyboardInterrupt


def test_after_an_interruption_no_batch_is_begun(run, monkeypatch):
    monkeypatch.setattr(batch_run, "prefill", None)
    document = run(batch=2, progress=Stopping())
    assert document["interrupted"] and document["batch"] is None and document["answers"] == 1
    assert run()["batch"] is None


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 8)), min_size=1)
)
def test_the_share_ends_at_the_first_difference(cases):
    alone = [tokens for tokens, _ in cases]
    together = [
        tokens[:place] + [token + 1 for token in tokens[place:]] if place < len(tokens) else tokens
        for tokens, place in cases
    ]
    want = sum(min(place, len(tokens)) for tokens, place in cases) / sum(map(len, alone))
    assert same_share(alone, [*together, [9, 9]]) == pytest.approx(want)


def test_what_is_behind_a_difference_is_not_counted():
    assert same_share([[1, 2, 3, 4]], [[1, 5, 3, 4]]) == 0.25


CUDA = SimpleNamespace(device=torch.device("cuda"), geometry=GEOMETRY)


@pytest.mark.parametrize(
    ("engine", "plan", "place", "said"),
    [
        ("torch", PLAN, None, "which --engine torch rules out"),
        ("auto", PLAN, SimpleNamespace(device=torch.device("cpu")), "which needs a CUDA device, not 'cpu'"),
        ("auto", Plan(get_policy("pqcache")), CUDA, "does not run here: there are no kernels for policy"),
    ],
)
def test_an_engine_of_one_sequence_is_refused(loaded, engine, plan, place, said):
    opened = SimpleNamespace(name="torch", loaded=place or loaded, plan=plan, offload="none")
    with pytest.raises(InputError, match=f"--batch decodes by the fused engine.*{said}") as refused:
        BatchRun.of(2, opened, engine, EngineOptions(0.1, 100), SAMPLES, STEPS)
    assert "leave out --batch" in str(refused.value.hint)


def test_nothing_runs_where_the_batch_is_refused(run, loaded, monkeypatch):
    with pytest.raises(InputError, match="--batch must be at least 1, not 0"):
        run(batch=0)
    with pytest.raises(InputError, match="--batch and --sweep exclude each other"):
        sweep(loaded, SAMPLES, PLAN, "recent", [24], batch=2)
    monkeypatch.setattr(batch_run, "free_bytes", lambda device: WORKING_BYTES + (1 << 20))
    monkeypatch.setattr(FusedEngine, "feed", None)
    with pytest.raises(InputError, match=r"100 sequences together need about .* on the GPU"):
        run(batch=100)


@given(
    size=st.integers(1, 40),
    rows=st.integers(1, 10**5),
    cached_share=st.none() | st.floats(0.01, 1.0),
    device=st.integers(0, 1 << 34),
    host=st.integers(0, 1 << 34),
)
def test_the_batch_said_to_fit_fits_and_the_next_does_not(size, rows, cached_share, device, host):
    free = device, None if cached_share is None else host

    def refused(wanted: int) -> InputError | None:
        try:
            check_batch(GEOMETRY, wanted, rows, cached_share, *free)
        except InputError as error:
            return error
        return None

    error = refused(size)
    if error is None:
        assert refused(max(size - 1, 1)) is None
        return
    said = re.search(r"a batch of (\d+) would fit", error.hint or "")
    fits = int(said[1]) if said else 0
    assert fits < size and refused(fits + 1)
    where = "host memory" if "host memory" in error.message else "on the GPU"
    left = refused(fits) if fits else None
    assert left is None or where not in left.message


def test_a_batch_needs_its_keys_values_and_an_index():
    kv = 1000 * GEOMETRY.kv_bytes_per_token
    needed = (4 + 2) * kv * 9 // 8 + WORKING_BYTES
    check_batch(GEOMETRY, 4, 1000, None, needed, None)
    with pytest.raises(InputError, match="4 sequences together need about") as refused:
        check_batch(GEOMETRY, 4, 1000, None, needed - 1, None)
    assert refused.value.hint == "a batch of 3 would fit: use --batch 3"
    check_batch(GEOMETRY, 4, 1000, None, None, None)
    with pytest.raises(InputError, match="of host memory"):
        check_batch(GEOMETRY, 4, 1000, 0.05, None, 4 * kv)
