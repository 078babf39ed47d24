"""A live run on disk: the trace holds what the approximated run saw, and can be analysed."""

from __future__ import annotations

import pytest
import torch
from runtime_model import CONTEXT, SAMPLE, live_plan, loaded_tiny, single
from tiny_models import GivenSamples, tiny_tokenizer

from kvtune import analyze
from kvtune.capturing import capture
from kvtune.errors import InputError
from kvtune.models import LoadedModel
from kvtune.runtime import live
from kvtune.runtime.engine import EngineOptions
from kvtune.runtime.live_trace import LiveTrace
from kvtune.runtime.torch_engine import TorchEngine
from kvtune.traces import open_trace


@pytest.fixture(scope="module")
def loaded():
    plain = loaded_tiny()
    return LoadedModel(plain.model, tiny_tokenizer(), plain.geometry, "tiny", "f00d", "")


def recorded(loaded, folder, case, samples=(SAMPLE,), decode=6, **options):
    plan = live_plan(case)
    record = LiveTrace(folder, loaded, samples, plan, cache_fraction=0.1, decode=decode, **options)
    return live(loaded, samples, plan, cache_fraction=0.1, decode=decode, record=record)


@pytest.fixture(scope="module")
def trace(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("live") / "t"
    recorded(loaded, folder, "streaming")
    return open_trace(folder, verify=True)


def test_the_manifest_says_that_the_run_was_approximated(trace):
    found = trace.manifest["approximated"]
    assert found["policy"] == "streaming" and found["parameters"] == {"sink": 4, "recent": 200}
    assert found["cache_fraction"] == 0.1 and trace.manifest["complete"]


def test_segments_are_the_runs(trace):
    """Two requests fork after the context; forced answers stay in the conversation."""
    kinds = [(s.kind, s.request, s.turn, s.start, s.length) for s in trace.segments(0)]
    n = len(CONTEXT)
    assert kinds == [
        ("context", -1, -1, 0, n),
        ("question", 0, 0, n, 20),
        ("generated", 0, 0, n + 20, 6),
        ("question", 0, 1, n + 26, 9),
        ("generated", 0, 1, n + 35, 6),
        ("question", 1, 0, n, 1),
        ("generated", 1, 0, n + 1, 6),
    ]
    assert [record.reference for record in trace.samples] == ["a", "a", None]


def test_vectors_are_those_the_engine_held(trace, loaded):
    """Keys, values and queries of the second turn, bit for bit; queries of prompts from the last 1,024 on."""
    timeline = trace.timelines(0)[0]
    answers = [s for s in timeline.segments if s.kind == "generated"]
    shown = []
    with TorchEngine(loaded, live_plan("streaming"), EngineOptions(0.1, 1400)) as engine:
        engine.feed(CONTEXT)
        engine.build()
        engine.feed(SAMPLE.requests[0].turns[0].question_ids)
        for token in timeline.token_ids[answers[0].start : answers[0].stop].tolist():
            engine.step(token)
        engine.feed(SAMPLE.requests[0].turns[1].question_ids)
        with engine.showing(lambda layer, at, rows: shown.append((layer, at, rows.clone()))):
            for token in timeline.token_ids[answers[1].start : answers[1].stop].tolist():
                engine.step(token)
        for number in (0, 2):
            layer = timeline.layer(number)
            keys, values = engine.keys_values(number)
            assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
            wanted = torch.cat([rows for at_layer, _, rows in shown if at_layer == number])
            last = layer.query_positions >= answers[1].start
            assert torch.equal(layer.queries[last], wanted)
            assert int(layer.query_positions.min()) == len(CONTEXT) - 1024


def test_approximation_changes_what_is_seen(trace, loaded, tmp_path):
    """Beside a full-attention run of the same tokens: layer 0's keys are equal, deeper ones are not."""
    recorded(loaded, tmp_path / "full", "full")
    exact, sparse = open_trace(tmp_path / "full").timelines(0)[0], trace.timelines(0)[0]
    assert torch.equal(exact.token_ids, sparse.token_ids)
    assert torch.equal(exact.layer(0).keys, sparse.layer(0).keys)
    late = slice(len(CONTEXT) + 21, None)
    assert not torch.equal(exact.layer(2).keys[:, late], sparse.layer(2).keys[:, late])
    assert torch.equal(exact.layer(2).keys[:, : len(CONTEXT)], sparse.layer(2).keys[:, : len(CONTEXT)])


def test_full_attention_recorded_live_is_a_capture(loaded, tmp_path):
    """Under the policy 'full' the vectors are those of a forced capture (to the last bits of a batch)."""
    sample = single(SAMPLE)
    recorded(loaded, tmp_path / "live", "full", [sample], decode=1)
    capture(loaded, GivenSamples([sample]), tmp_path / "captured", decode=5, force=True)
    one, other = (open_trace(tmp_path / name).timelines(0)[0] for name in ("live", "captured"))
    assert torch.equal(one.token_ids, other.token_ids)
    for layer in range(3):
        for name in ("keys", "values", "queries"):
            found, wanted = (getattr(t.layer(layer), name) for t in (one, other))
            assert torch.allclose(found, wanted, atol=1e-4)
        assert one.layer(layer).phases == other.layer(layer).phases


def test_analyze_reads_it(trace, tmp_path):
    document = analyze(trace, out=tmp_path / "analysis")
    assert document["output_error"]["mean"] > 0


def test_a_run_that_is_stopped_keeps_whole_samples(loaded, tmp_path, monkeypatch):
    samples = [single(SAMPLE, 0), single(SAMPLE, 1)]
    start, begun = TorchEngine.start, []

    def interrupted(self):
        begun.append(None)
        if len(begun) == 3:  # the first is its making
            raise KeyboardInterrupt
        start(self)

    monkeypatch.setattr(TorchEngine, "start", interrupted)
    document = recorded(loaded, tmp_path / "t", "quest", samples)
    assert document["interrupted"] and document["requests"] == 1
    trace = open_trace(tmp_path / "t", verify=True)
    assert trace.n_samples == 1 and trace.manifest["workload"]["samples"] == 2


def test_a_folder_that_exists_is_not_touched(loaded, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(InputError, match="not a kvtune trace"):
        recorded(loaded, tmp_path / "there", "quest")
    recorded(loaded, tmp_path / "t", "quest", decode=1)
    with pytest.raises(InputError, match="exists already"):
        recorded(loaded, tmp_path / "t", "quest")
    recorded(loaded, tmp_path / "t", "streaming", decode=1, overwrite=True)
    assert open_trace(tmp_path / "t").manifest["approximated"]["policy"] == "streaming"
