from __future__ import annotations

import errno
import json
import math
import re
from html.parser import HTMLParser

import pyarrow.parquet as pq
import pytest
import torch

from kvtune.analysis import analyze
from kvtune.analysis.evaluate import evaluate
from kvtune.analysis.figures import head_means
from kvtune.analysis.report import findings, subtitle, windows_note
from kvtune.errors import InputError, RunError, TraceError
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.traces import open_trace

ORACLE = {"tokens": 12, "sink": 2, "local": 6}


@pytest.fixture(scope="module")
def analysis(tiny_trace, tmp_path_factory):
    """The folder and the document of one analysis."""
    out = tmp_path_factory.mktemp("analysis") / "out"
    return out, analyze(tiny_trace, "oracle_topk", ORACLE, out=out)


def test_the_document_has_the_promised_keys(analysis):
    _, document = analysis
    assert set(document["query_cosine"]) == {"lag1", "lag2", "lag4", "lag8"}
    assert set(document["query_cosine"]["lag1"]) >= {"mean", "p10", "p50", "p90"}
    assert "mean" in document["overlap_at_100"]["lag8"]
    assert set(document["recall_at_100"]) == {"index", "attention"}
    assert set(document["output_error"]) >= {"mean", "p50", "p95"}
    assert set(document["tokens_for_mass"]) == {"90", "95", "99"}
    for key in ("entropy", "attention_mass"):
        assert math.isfinite(document[key]["mean"])
    for key in ("effective_tokens", "read_bytes_per_step"):
        assert document[key] > 0
    assert [entry["layer"] for entry in document["layers"]] == [0, 1, 2]
    assert set(document["layers"][0]) >= {"query_cosine", "overlap_at_100", "recall_at_100", "output_error"}
    for claim in document["claims"]:
        assert set(claim) >= {"claim", "measured", "holds"}
    assert document["score"] == {"random": 0.5}
    assert document["decode_steps"] == 2 * 2 * 9


def test_the_bytes_of_the_whole_are_those_of_its_layers(analysis):
    _, document = analysis
    for key in ("read_bytes_per_step", "full_read_bytes_per_step"):
        assert document[key] == pytest.approx(sum(entry[key] for entry in document["layers"]))


def test_windowed_layers_are_served_by_full_attention(analysis):
    _, document = analysis
    windowed = document["layers"][2]
    assert (windowed["window"], windowed["policy"]) == (24, "full")
    assert windowed["output_error"]["mean"] < 1e-5
    assert windowed["visible_tokens"] == 24
    assert document["windowed_layers"] == [2]


@pytest.mark.parametrize("measure", ["output_error", "attention_mass"])
def test_quality_is_that_of_the_layers_that_a_policy_serves(analysis, measure):
    """A windowed layer, which is exact, would flatter every policy; its bytes are read all the same."""
    _, document = analysis
    served = [entry[measure]["mean"] for entry in document["layers"][:2]]
    assert document[measure]["mean"] == pytest.approx(sum(served) / 2)
    tokens = [entry["effective_tokens"] for entry in document["layers"][:2]]
    assert document["effective_tokens"] == pytest.approx(sum(tokens) / 2)
    assert document["visible_tokens"] == pytest.approx(
        sum(entry["visible_tokens"] for entry in document["layers"]) / 3
    )


def test_the_report_says_which_layers_stay_dense(analysis, tiny_trace):
    out, document = analysis
    assert "1 sliding layer left dense" in subtitle(document)
    (note,) = windows_note(document)
    assert note.startswith("1 of the 3 layers slide") and note in (out / "report.html").read_text()
    assert windows_note(analyze(tiny_trace, layers=[0, 1])) == []
    alone = analyze(tiny_trace, "oracle_topk", ORACLE, layers=[2])
    assert "nothing is chosen" in windows_note(alone)[0]
    assert alone["output_error"]["mean"] < 1e-5, "exact, not unknown"


def test_the_files_say_what_the_document_says(analysis):
    out, document = analysis
    assert sorted(path.name for path in out.iterdir()) == ["metrics.parquet", "report.html", "summary.json"]
    written = json.loads((out / "summary.json").read_text())
    assert written["output_error"] == document["output_error"]
    assert written["output_error_without_estimation"]["mean"] is None
    _, layers, means = head_means(pq.read_table(out / "metrics.parquet"), "error")
    for row, layer in enumerate(layers):
        expected = document["layers"][layer]["output_error"]["mean"]
        assert means[row].mean() == pytest.approx(expected, rel=1e-5, abs=1e-9)


class Links(HTMLParser):
    """Collects whatever a browser would fetch or run, and whether tags are closed in order."""

    def __init__(self):
        super().__init__()
        self.fetched, self.open = [], []

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "link", "img", "iframe", "object"):
            self.fetched.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset", "onload")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_page_that_needs_no_network(analysis):
    out, document = analysis
    page = (out / "report.html").read_text(encoding="utf-8")
    links = Links()
    links.feed(page)
    assert links.fetched == [] and links.open == []
    assert not re.search(r"https?://|@import|url\(", page)
    assert document["model"] in page and document["provenance"]["fingerprint"] in page
    assert page.count("<svg") >= 10
    assert len(re.findall(r"<figure><h3>[^<]+</h3>", page)) == page.count("<figure>")
    assert "nan" not in re.sub(r"<style>.*</style>", "", page, flags=re.S).lower().split()


def test_equal_runs_give_equal_numbers(tiny_trace, analysis):
    _, document = analysis
    again = analyze(open_trace(tiny_trace), get_policy("oracle_topk", ORACLE))
    for key in ("output_error", "entropy", "query_cosine", "overlap_at_100", "recall_at_100", "by_turn"):
        assert again[key] == document[key]


def test_some_layers_and_a_plan(tiny_trace):
    plan = Plan(get_policy("streaming", {"sink": 1, "recent": 8}), dense_layers=(1,))
    document = analyze(tiny_trace, plan, layers=[1, 0])
    assert [entry["policy"] for entry in document["layers"]] == ["streaming", "full"]
    assert (
        document["layers"][1]["output_error"]["mean"] < 1e-5 < document["layers"][0]["output_error"]["mean"]
    )


def test_a_precision_is_that_of_the_cache_under_the_policy(tiny_trace):
    policy, plain = get_policy("oracle_topk", ORACLE), analyze(tiny_trace, get_policy("oracle_topk", ORACLE))
    document = analyze(tiny_trace, policy, precision="int4")
    trace, errors = open_trace(tiny_trace), []
    for timeline in (t for sample in range(trace.n_samples) for t in trace.timelines(sample)):
        for number in (0, 1):
            layer, length = timeline.layer(number), timeline.prompt_length
            errors.append(evaluate(policy, layer, length, precision="int4").error)
    assert document["output_error"]["mean"] == pytest.approx(float(torch.cat(errors).mean()), rel=1e-5)
    assert document["output_error"]["mean"] > plain["output_error"]["mean"]
    assert document["read_bytes_per_step"] < plain["read_bytes_per_step"]
    assert document["entropy"] == plain["entropy"]
    assert (document["policy"]["precision"], plain["policy"]["precision"]) == ("int4", None)
    assert any("oracle_topk in int4 reads" in sentence for sentence in findings(document))


def test_a_precision_needs_values(make_trace, tmp_path):
    path = make_trace(tmp_path / "keys", samples=1, with_values=False)
    with pytest.raises(InputError, match="needs values"):
        analyze(path, precision="fp8")


def test_the_default_policy_is_the_wave_index(tiny_trace):
    assert analyze(tiny_trace, layers=[0])["policy"]["name"] == "wave_index"


@pytest.mark.parametrize("layers", [[3], [0, 99], [-1], []])
def test_layers_out_of_range_are_refused(tiny_trace, layers):
    with pytest.raises(InputError, match="layer"):
        analyze(tiny_trace, layers=layers)


@pytest.mark.parametrize(
    ("policy", "settings", "words"),
    [
        ("wave_indx", None, "unknown policy"),
        ("streaming", {"recnt": 3}, "unknown parameter"),
        ("streaming", {"recent": 0}, "recent"),
    ],
)
def test_policies_and_parameters_are_checked_first(tmp_path, policy, settings, words):
    with pytest.raises(InputError, match=words):
        analyze(tmp_path / "no trace here", policy, settings)


def test_settings_need_a_name(tiny_trace):
    with pytest.raises(InputError, match="already built"):
        analyze(tiny_trace, get_policy("full"), {"sink": 4})


def test_a_nan_key_is_located_and_nothing_is_written(make_trace, tmp_path):
    path = make_trace(tmp_path / "poisoned", samples=1, poison=17)
    with pytest.raises(TraceError, match=r"sample 0, layer 0, head 1, position 17"):
        analyze(path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_names_the_file(make_trace, tmp_path):
    path = make_trace(tmp_path / "flipped", samples=1)
    victim = path / "kv" / "sample=0" / "layer=1.parquet"
    content = bytearray(victim.read_bytes())
    content[len(content) // 3] ^= 4
    victim.write_bytes(content)
    with pytest.raises(TraceError, match=r"layer=1\.parquet"):
        analyze(path)


def test_an_output_folder_that_exists_is_kept(tiny_trace, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="exists"):
        analyze(tiny_trace, "full", layers=[0], out=out)
    analyze(tiny_trace, "full", layers=[0], out=out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "report.html").exists()


def test_an_output_that_is_a_file_is_refused(tiny_trace, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(InputError, match="not a folder"):
        analyze(tiny_trace, out=tmp_path / "out", overwrite=True)


def test_a_full_disk_leaves_nothing_half_written(tiny_trace, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvtune.analysis.output.os.replace", full)
    with pytest.raises(RunError, match="the disk is full"):
        analyze(tiny_trace, "full", layers=[0], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_trace_without_values_still_shows_its_attention(make_trace, tmp_path):
    path = make_trace(tmp_path / "keys", samples=1, with_values=False)
    document = analyze(path, out=tmp_path / "out")
    assert math.isfinite(document["entropy"]["mean"])
    assert math.isnan(document["output_error"]["mean"])
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert written["output_error"]["mean"] is None
    assert "Output error" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_five_samples_give_intervals_and_names_are_escaped(make_trace, tmp_path):
    path = make_trace(tmp_path / "five", samples=5, layers=(0,), model="<script>x")
    document = analyze(path, "full", out=tmp_path / "out")
    assert document["entropy"]["low"] <= document["entropy"]["mean"] <= document["entropy"]["high"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "95% interval" in page
    assert "<script>" not in page


def test_progress_counts_every_layer_of_every_timeline(tiny_trace):
    from contextlib import contextmanager

    class Counter:
        total, done = 0, 0

        @contextmanager
        def task(self, label, total):
            self.total = total
            yield self

        def advance(self, n=1, note=""):
            self.done += n

    counter = Counter()
    analyze(tiny_trace, "full", layers=[0, 2], progress=counter)
    assert counter.done == counter.total == 2 * 2
