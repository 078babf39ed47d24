"""Several requests over one context, free running, turns, and a run that is stopped."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest
import torch
from runtime_model import CONTEXT, LIVE, SAMPLE, live_plan, loaded_tiny, random_ids, single
from tiny_models import tiny_loaded, toy_workload

from kvtune.errors import InputError
from kvtune.hardware import TERMS, LayerCost, StepCost, Term
from kvtune.policies import get_policy
from kvtune.runtime import live
from kvtune.runtime.decoding import free_pass
from kvtune.runtime.engine import EngineOptions
from kvtune.runtime.measurements import FreeAnswer
from kvtune.runtime.torch_engine import TorchEngine
from kvtune.workloads import Request, Sample, Turn


@pytest.fixture(scope="module")
def loaded():
    return loaded_tiny()


class Listener:
    """Progress that calls back after each request."""

    def __init__(self, on_advance):
        self.advance = lambda n=1, note="": on_advance()

    @contextmanager
    def task(self, label, total):
        yield self


def empty_question(sample):
    """The sample without its first questions: its context is the whole prompt."""
    requests = tuple(Request((Turn("", (), None, ()), *r.turns[1:])) for r in sample.requests)
    return Sample(sample.task, sample.context_ids, requests)


@pytest.mark.parametrize("case", sorted(LIVE))
def test_two_requests_are_each_alone(loaded, case):
    """Where the question is empty, the index over the context is the one a single request builds."""
    both = empty_question(SAMPLE)
    options = {"cache_fraction": 0.1, "decode": 6}
    together = live(loaded, [both], live_plan(case), **options)
    alone = live(loaded, [single(both, 0), single(both, 1)], live_plan(case), **options)
    for key in ("kl", "top1", "delta_nll", "hit_ratio", "replayed_hit_ratio", "answers", "requests"):
        assert together[key] == alone[key], key
    assert together["forecast_hit_ratio"] == alone["forecast_hit_ratio"]
    assert together["replay_equal"] is not False


def test_one_index_serves_all_requests_of_a_context(loaded, monkeypatch):
    built = []
    plain = TorchEngine.build

    def build(self):
        built.append(self.length)
        plain(self)

    monkeypatch.setattr(TorchEngine, "build", build)
    live(loaded, [SAMPLE], live_plan("wave_index"), decode=2)
    assert built == [len(CONTEXT)], "over the context alone"
    built.clear()
    live(loaded, [single(SAMPLE, 0), single(SAMPLE, 1)], live_plan("wave_index"), decode=2)
    assert built == [len(CONTEXT) + 20, len(CONTEXT) + 1], "over context and question"


def test_free_running_costs_nothing_where_nothing_is_approximated(loaded):
    lossless = get_policy("wave_index", {"retrieval": 1.0, "estimation": 0.0})
    free = live(loaded, [SAMPLE], lossless, decode=6)["forecast_hit_ratio"]["free"]
    assert free["drift"] == {"answers": 3, "diverged": 0, "first_token": None}
    assert free["difference_points"] == pytest.approx(0, abs=1e-9)


def test_free_running_can_be_left_out(loaded):
    document = live(loaded, [SAMPLE], live_plan("quest"), decode=3, free=False, forecast=False)
    assert document["forecast_hit_ratio"]["free"] is None and document["score"] == {}
    assert document["forecast_hit_ratio"]["forced"]["page"] is None
    assert document["hit_ratio"]["page"] is not None


def test_references_are_fed_back_between_free_turns(loaded):
    """An answer that is replaced leaves no trace; from a turn without reference on, answers stay."""
    fed = Request((Turn("", (), "a", random_ids(3, 7)), Turn("", random_ids(4, 8), None, ()),
                   Turn("", random_ids(2, 9), "a", random_ids(2, 1)), Turn("", (), "a", ())))  # fmt: skip
    lengths = []
    with TorchEngine(loaded, live_plan("full"), EngineOptions(0.1, 1400)) as engine:
        engine.feed(CONTEXT)
        answers = free_pass(engine, fed, 5, lambda: lengths.append(engine.length))
        assert engine.length == len(CONTEXT) + 3 + 4 + len(answers[1]) + 2 + len(answers[2]) + len(answers[3])
        engine.start()
        engine.feed([*CONTEXT, *fed.turns[0].reference_ids, *fed.turns[1].question_ids])
        expected = free_pass(engine, Request(fed.turns[1:]), 5, lambda: None)
    assert answers[1:] == expected
    assert len(lengths) == 2 and lengths[0] == len(CONTEXT) + len(answers[0])


def test_a_free_answer_ends_before_the_end_token():
    loaded = tiny_loaded()
    (sample,) = toy_workload(samples=1, requests=1, turns=1).samples(None, None, 1, 1, 1, 0)
    with TorchEngine(loaded, live_plan("full"), EngineOptions(0.1, 200)) as engine:
        engine.feed(sample.context_ids)
        start = engine.mark()
        (free,) = free_pass(engine, sample.requests[0], 12, lambda: None)
        loaded.model.generation_config.eos_token_id = [free[4]]
        engine.rewind(start)
        (stopped,) = free_pass(engine, sample.requests[0], 12, lambda: None)
    assert len(free) == 12 and stopped == free[: free.index(free[4])]


@pytest.mark.parametrize(
    ("full", "plan", "place"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (), None), ((1, 2), (), 0)],
)
def test_where_answers_part(full, plan, place):
    assert FreeAnswer(0, "t", full, plan, None, None).diverges_at == place


def test_scores_by_task_and_turn():
    """A workload whose references are the model's own answers: full attention scores 1."""
    loaded = tiny_loaded()
    workload = toy_workload(samples=3, requests=2, turns=2)
    document = live(
        loaded, workload.samples(None, None, 3, 2, 2, 0), "wave_index", decode=8, workload=workload
    )
    score = document["score"]["given"]
    assert score["n"] == 12 and score["full"] == score["profile"], "dense below 1,024 tokens"
    assert score["difference"] == {"mean": 0, "low": 0, "high": 0}
    assert "cannot do the task" in score["note"] and "of 12 answers" in score["note"]
    assert [row["turn"] for row in document["per_turn"]] == [0, 1]
    assert [row["score"]["n"] for row in document["per_turn"]] == [6, 6]


def test_turns_are_measured_apart(loaded):
    """Means of the turns, weighted by their steps, are the whole."""
    document = live(loaded, [SAMPLE], live_plan("streaming"), decode=8)
    rows = document["per_turn"]
    steps = [16, 8]
    assert sum(n * row["kl"]["mean"] for n, row in zip(steps, rows)) / 24 == pytest.approx(
        document["kl"]["mean"]
    )
    assert rows[0]["score"] is None


def test_an_interrupted_run_keeps_the_answers_it_has(loaded):
    samples = [single(SAMPLE, 0), single(SAMPLE, 1)]
    whole = live(loaded, samples[:1], live_plan("wave_index"), decode=4)

    def interrupt():
        raise KeyboardInterrupt

    document = live(loaded, samples, live_plan("wave_index"), decode=4, progress=Listener(interrupt))
    assert document["interrupted"] is True and document["requests"] == 1
    for key in ("kl", "hit_ratio", "replay_equal", "forecast_hit_ratio", "score"):
        assert document[key] == whole[key]
    assert loaded.model.config._attn_implementation == "sdpa"


def test_interrupted_before_any_answer_there_is_nothing(loaded, monkeypatch):
    def feed(self, ids, then_build=False):
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchEngine, "feed", feed)
    with pytest.raises(KeyboardInterrupt):
        live(loaded, [SAMPLE], live_plan("wave_index"), decode=4)


def test_a_run_keeps_no_logits(loaded):
    """Between requests, no matrix of answers × vocabulary is alive."""
    alive = []

    def count():
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
        alive.append([tuple(t.shape) for t in tensors if t.dim() == 2 and t.shape[-1] == 97])

    live(loaded, [SAMPLE], live_plan("quest"), decode=4, progress=Listener(count))
    assert alive == [[], []]


def test_a_prediction_stands_beside(loaded):
    seen = []

    def predict(run, plan):
        seen.append((run.forced.fraction, len(run.timings.steps), plan.policy.name))
        layer = LayerCost({"attend": Term(1e-3, 0.0, 10.0, "device memory")}, 0.0)
        return StepCost(1, (layer,), Term(5e-4, 0.0, 1.0, "compute"), Term(0.0, 0.0, 0.0, "launch"))

    document = live(loaded, [SAMPLE], live_plan("quest"), decode=2, free=False, predict=predict)
    assert document["predicted_step_ms"] == 1.5 and seen == [(0.05, 10, "quest")]
    assert set(document["predicted_terms_ms"]) == set(TERMS)
    assert document["predicted_terms_ms"]["attend"] == 1.0 and document["predicted_hidden_ms"] == 0.0


def test_what_cannot_be_predicted_is_a_note(loaded):
    def predict(run, plan):
        raise InputError("the machine is unknown")

    document = live(loaded, [SAMPLE], live_plan("quest"), decode=2, free=False, predict=predict)
    assert document["predicted_step_ms"] is None and document["predicted_terms_ms"] is None
    assert document["notes"] == ["the step's time is not predicted: the machine is unknown"]
