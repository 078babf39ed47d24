"""Captures of tiny models: the tree of segments, its vectors, choices, resume, refusals."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import GivenSamples, tiny_loaded, tokens, toy_workload

from kvtune.capturing import capture
from kvtune.capturing.loop import Session
from kvtune.errors import InputError, TraceError
from kvtune.models import attention_through, cached, sdpa
from kvtune.traces import Trace, open_trace
from kvtune.workloads import Request, Sample, Turn

KEYS = {"trace", "samples", "requests", "units", "tokens", "decode_steps", "seconds", "bytes", "score"}


@pytest.fixture(scope="module")
def llama():
    return tiny_loaded("llama")


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def kinds(trace: Trace, sample: int = 0) -> list[tuple[str, int, int]]:
    return [(s.kind, s.request, s.parent) for s in trace.segments(sample)]


def test_the_document(llama, tmp_path: Path):
    document = capture(llama, toy_workload(samples=2, requests=2, turns=2), tmp_path / "t", decode=6)
    assert set(document) == KEYS
    trace = open_trace(tmp_path / "t", verify=True)
    assert document["trace"] == str(tmp_path / "t")
    assert document["samples"] == 2 and document["requests"] == 4
    assert document["units"] == 4 * 3 * 2
    assert document["decode_steps"] == sum(
        len(trace.tokens(s.sample, s.segment))
        for sample in range(2)
        for s in trace.segments(sample)
        if s.kind == "generated"
    )
    assert document["bytes"] == sum(f.stat().st_size for f in (tmp_path / "t").rglob("*") if f.is_file())
    assert set(document["score"]) == {"given"} and 0 <= document["score"]["given"] <= 1
    assert document["seconds"] > 0


def test_references_are_fed_back_beside_the_answers(llama, tmp_path: Path):
    workload = toy_workload(samples=1, requests=2, turns=2)
    capture(llama, workload, tmp_path / "t", decode=6)
    trace = open_trace(tmp_path / "t")
    assert kinds(trace) == [
        ("context", -1, -1),
        ("question", 0, 0),
        ("generated", 0, 1),
        ("fed_back", 0, 1),
        ("question", 0, 3),
        ("generated", 0, 4),
        ("question", 1, 0),
        ("generated", 1, 6),
        ("fed_back", 1, 6),
        ("question", 1, 8),
        ("generated", 1, 9),
    ]
    (sample,) = workload.samples(None, None, 1, 1, 1, 0)
    assert tuple(trace.tokens(0, 3).tolist()) == sample.requests[0].turns[0].reference_ids
    assert [len(timeline.turns) for timeline in trace.timelines(0)] == [1, 1, 1, 1]


def test_answers_stay_if_asked_to(llama, tmp_path: Path):
    capture(llama, toy_workload(samples=1, requests=1), tmp_path / "t", decode=6, keep_answers=True)
    assert kinds(open_trace(tmp_path / "t")) == [
        ("context", -1, -1),
        ("question", 0, 0),
        ("generated", 0, 1),
        ("question", 0, 2),
        ("generated", 0, 3),
    ]


def test_answers_stay_where_there_is_no_reference(llama, tmp_path: Path):
    document = capture(llama, toy_workload(samples=1, requests=1, references=False), tmp_path / "t", decode=6)
    assert [kind for kind, _, _ in kinds(open_trace(tmp_path / "t"))].count("fed_back") == 0
    assert document["score"] == {"given": None}


def test_forced_answers_are_the_references(llama, tmp_path: Path):
    workload = toy_workload(samples=1, requests=2)
    capture(llama, workload, tmp_path / "t", decode=4, force=True)
    trace = open_trace(tmp_path / "t")
    (sample,) = workload.samples(None, None, 1, 1, 1, 0)
    references = [turn.reference_ids[:4] for request in sample.requests for turn in request.turns]
    found = [tuple(trace.tokens(0, s.segment).tolist()) for s in trace.segments(0) if s.kind == "generated"]
    assert found == references
    assert all(r.score == 1.0 for r in trace.samples if len(r.reference.split()) <= 4)


@pytest.mark.parametrize("family", ["llama", "qwen2_windows", "gemma3"])
def test_every_timeline_is_what_a_plain_run_would_see(family: str, tmp_path: Path):
    """Each timeline run on its own, whole, has the same keys, values and queries at the same positions."""
    loaded = tiny_loaded(family)
    capture(loaded, toy_workload(samples=1, requests=2), tmp_path / "t", decode=5, prompt_queries=7)
    trace = open_trace(tmp_path / "t")
    for timeline in trace.timelines(0):
        seen: dict[int, list[torch.Tensor]] = {}
        session = Session(loaded)

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, seen=seen, **options: Any):
            seen.setdefault(module.layer_idx, []).append(query[0].transpose(0, 1))
            return sdpa(module, query, key, value, mask, **options)

        with attention_through(loaded.model, attend):
            session.feed(timeline.token_ids.tolist())
        for number in trace.layers:
            layer = timeline.layer(number)
            keys, values = cached(session.cache, number)
            torch.testing.assert_close(layer.keys, keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(layer.values, values, rtol=1e-4, atol=1e-4)
            plain = torch.cat(seen[number])[layer.query_positions]
            torch.testing.assert_close(layer.queries, plain, rtol=1e-4, atol=1e-4)
            assert layer.decode.sum() > 0
            assert (layer.query_positions[layer.decode] >= timeline.prompt_length).all()


def test_prompt_queries_are_the_last_of_context_and_question(llama, tmp_path: Path):
    capture(llama, toy_workload(samples=1, requests=1, turns=1, context=40), tmp_path / "t", prompt_queries=3)
    (timeline,) = open_trace(tmp_path / "t").timelines(0)
    layer = timeline.layer(0)
    assert layer.query_positions[~layer.decode].tolist() == [37, 38, 39, 41, 42, 43]
    assert layer.steps[layer.decode].tolist() == list(range(int(layer.decode.sum())))


def test_all_or_no_prompt_queries(llama, tmp_path: Path):
    workload = toy_workload(samples=1, requests=1, turns=1)
    for count, expected in ((None, 44), (0, 0)):
        capture(llama, workload, tmp_path / f"{count}", prompt_queries=count)
        (timeline,) = open_trace(tmp_path / f"{count}").timelines(0)
        assert int((~timeline.layer(1).decode).sum()) == expected


def test_a_subset_holds_the_same_vectors(llama, tmp_path: Path):
    workload = toy_workload(samples=1)
    capture(llama, workload, tmp_path / "all", decode=4)
    capture(llama, workload, tmp_path / "some", decode=4, layers=[2, 0], kv_heads=[1], values=False)
    whole, some = open_trace(tmp_path / "all"), open_trace(tmp_path / "some")
    assert some.layers == (0, 2) and some.kv_heads == (1,) and not some.has_values
    for a, b in zip(whole.timelines(0), some.timelines(0), strict=True):
        full, part = a.layer(2), b.layer(2)
        assert torch.equal(part.keys, full.keys[1:])
        assert torch.equal(part.queries, full.queries[:, llama.geometry.group :])


def test_bfloat16_is_kept_bit_for_bit(tmp_path: Path):
    """pytorch#110285: bfloat16 tensors have no numpy form."""
    loaded = tiny_loaded()
    loaded.model.to(torch.bfloat16)
    loaded = replace(loaded, geometry=replace(loaded.geometry, dtype="bfloat16"))
    workload = toy_workload(samples=1, requests=1, turns=1)
    capture(loaded, workload, tmp_path / "t", decode=3)
    (timeline,) = open_trace(tmp_path / "t").timelines(0)
    session = Session(loaded)
    session.feed(timeline.token_ids[: timeline.segments[0].length].tolist())
    keys, _ = cached(session.cache, 0)
    stored = timeline.layer(0).keys
    assert stored.dtype == torch.bfloat16 and torch.equal(stored[:, : keys.shape[1]], keys)


def test_output_projections(llama, tmp_path: Path):
    capture(llama, toy_workload(samples=1), tmp_path / "t", decode=2, o_proj=True)
    stored = open_trace(tmp_path / "t").o_proj(1)
    assert stored is not None
    assert torch.equal(stored, llama.model.model.layers[1].self_attn.o_proj.weight)


def test_an_answer_may_be_empty(tmp_path: Path):
    loaded = tiny_loaded()
    loaded.model.generation_config.eos_token_id = list(range(96))
    document = capture(loaded, toy_workload(samples=1, requests=1, turns=2), tmp_path / "t", decode=4)
    assert document["decode_steps"] == 0
    assert [record.generated for record in open_trace(tmp_path / "t", verify=True).samples] == ["", ""]


def test_a_raw_prompt_has_no_question(llama, tmp_path: Path):
    workload = GivenSamples([Sample("raw", tokens(30), (Request((Turn("", ()),)),))])
    capture(llama, workload, tmp_path / "t", decode=4)
    trace = open_trace(tmp_path / "t")
    assert kinds(trace) == [("context", -1, -1), ("generated", 0, 0)]
    assert trace.timelines(0)[0].prompt_length == 30


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", [1, 4, 9, 12])
def test_killed_and_resumed_gives_the_same_bytes(
    llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
):
    workload = toy_workload(samples=3, requests=1)
    whole = capture(llama, workload, tmp_path / "whole", decode=5, o_proj=True)
    feeds = 0
    feed = Session.feed

    def dying(session: Session, ids: Any) -> None:
        nonlocal feeds
        feeds += len(ids) > 1
        if feeds == moment:
            raise _Killed
        feed(session, ids)

    monkeypatch.setattr(Session, "feed", dying)
    with pytest.raises(_Killed):
        capture(llama, workload, tmp_path / "part", decode=5, o_proj=True)
    monkeypatch.setattr(Session, "feed", feed)
    with pytest.raises(TraceError, match="did not finish"):
        open_trace(tmp_path / "part")
    resumed = capture(llama, workload, tmp_path / "part", decode=5, o_proj=True, resume=True)
    assert digests(tmp_path / "part") == digests(tmp_path / "whole")
    assert {**resumed, "trace": "", "seconds": 0} == {**whole, "trace": "", "seconds": 0}


_SUICIDE = """
import os, signal, sys
from tiny_models import tiny_loaded, toy_workload
from kvtune.capturing import Session, capture
from kvtune.traces import SampleWriter

write = SampleWriter.keys_values
def dying(writer, layer, *rest):
    write(writer, layer, *rest)
    if writer.index == 1 and layer == 1:
        os.kill(os.getpid(), signal.SIGKILL)

SampleWriter.keys_values = dying
capture(tiny_loaded("llama"), toy_workload(samples=3, requests=1), sys.argv[1], decode=5)
"""


def test_a_process_killed_while_writing_resumes_to_the_same_bytes(llama, tmp_path: Path):
    """SIGKILL: no cleanup of any kind runs."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", _SUICIDE, str(tmp_path / "part")], env=environment, check=False
    )
    assert done.returncode == -signal.SIGKILL
    workload = toy_workload(samples=3, requests=1)
    capture(llama, workload, tmp_path / "part", decode=5, resume=True)
    capture(llama, workload, tmp_path / "whole", decode=5)
    assert digests(tmp_path / "part") == digests(tmp_path / "whole")


def test_resume_skips_what_is_there(llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    workload = toy_workload(samples=2)
    capture(llama, workload, tmp_path / "t", decode=3)
    monkeypatch.setattr(Session, "feed", lambda *_: pytest.fail("captured again"))
    capture(llama, workload, tmp_path / "t", decode=3, resume=True)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"decode": 4}, "settings.decode"), ({"seed": 5}, "seed"), ({"layers": [0]}, "layers")],
)
def test_resume_needs_the_same_settings(llama, tmp_path: Path, change: dict[str, Any], field: str):
    capture(llama, toy_workload(samples=1), tmp_path / "t", decode=3)
    with pytest.raises(InputError, match=f"begun with {field}"):
        capture(llama, toy_workload(samples=1), tmp_path / "t", **{"decode": 3, **change}, resume=True)


def test_resume_needs_the_same_prompts(llama, tmp_path: Path):
    capture(llama, toy_workload(samples=1, context=40), tmp_path / "t", decode=3)
    with pytest.raises(InputError, match=r"begun with workload\.digest"):
        capture(llama, toy_workload(samples=1, context=41), tmp_path / "t", decode=3, resume=True)


def test_nothing_is_overwritten_silently(llama, tmp_path: Path):
    capture(llama, toy_workload(samples=1), tmp_path / "t", decode=3)
    before = digests(tmp_path / "t")
    with pytest.raises(InputError, match="exists already"):
        capture(llama, toy_workload(samples=1), tmp_path / "t", decode=4)
    assert digests(tmp_path / "t") == before
    capture(llama, toy_workload(samples=1), tmp_path / "t", decode=4, overwrite=True)
    assert digests(tmp_path / "t") != before


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"decode": 0}, "--decode must be at least 1"),
    ({"prompt_queries": -1}, "--prompt-queries must be"),
    ({"layers": [3]}, "layer 3 is out of range"),
    ({"layers": []}, "no layer is chosen"),
    ({"kv_heads": [-1]}, "kv head -1 is out of range"),
    ({"decode": 250}, "the model reaches 256"),
    ({"force": True, "keep_answers": True}, "exclude each other"),
]


@pytest.mark.parametrize(("options", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_what_cannot_be_is_refused_before_anything_is_written(
    llama, tmp_path: Path, options: dict[str, Any], message: str
):
    with pytest.raises(InputError, match=message):
        capture(llama, toy_workload(samples=1), tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_forcing_needs_references(llama, tmp_path: Path):
    with pytest.raises(InputError, match="--force needs a reference"):
        capture(llama, toy_workload(references=False), tmp_path / "t", force=True)


def test_an_unknown_task_is_answered_with_a_suggestion(llama, tmp_path: Path):
    with pytest.raises(InputError, match="unknown task") as error:
        capture(llama, "niah_singel", tmp_path / "t")
    assert error.value.hint == "did you mean 'niah_single'?"


def test_a_disk_that_is_too_small(llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")(10, 5, 5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match="needs about"):
        capture(llama, toy_workload(samples=1), tmp_path / "deep" / "t")
    assert not (tmp_path / "deep").exists()


def test_a_nan_key_is_named(tmp_path: Path):
    loaded = tiny_loaded()
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.k_proj.weight[9] = float("nan")
    with pytest.raises(TraceError, match="sample 0, layer 1, head 1, position 0 is NaN"):
        capture(loaded, toy_workload(samples=1), tmp_path / "t")


def test_progress_adds_up(llama, tmp_path: Path):
    told: list[int] = []
    totals: list[int | None] = []

    class Listener:
        def advance(self, n: int = 1, note: str = "") -> None:
            told.append(n)

        @contextmanager
        def task(self, label: str, total: int | None):
            totals.append(total)
            yield self

    capture(llama, toy_workload(samples=2), tmp_path / "t", decode=8, progress=Listener())
    assert sum(told) == totals[0]
