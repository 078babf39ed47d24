"""Policies at equal read bytes on a small clustered trace."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from clustered_traces import write_clustered

from kvtune.analysis.compare import compare
from kvtune.analysis.comparison import Comparison
from kvtune.analysis.evaluate import decode_queries, evaluate
from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.traces import open_trace

KEYS = {
    "name", "params", "budget", "recall_at_100", "attention_mass", "output_error", "effective_tokens",
    "read_bytes_per_step", "scan_bytes", "index_bytes", "build_seconds", "matched", "note", "reference",
    "by_turn",
}  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return open_trace(write_clustered(tmp_path_factory.mktemp("compare") / "clustered", samples=2))


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A trace with prompt queries."""
    folder = tmp_path_factory.mktemp("asked") / "clustered"
    return open_trace(write_clustered(folder, samples=1, prompt_queries=40))


@pytest.fixture(scope="module")
def compared(trace, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "out"
    document = compare(
        trace, ["wave_index", "quest", "shadowkv"], {"shadowkv": {"outlier_chunks": 60}}, out=out
    )
    return document, out


def rows(document):
    return {row["name"]: row for row in document["policies"]}


def test_the_documents_keys_are_stable(compared):
    document, out = compared
    written = json.loads((out / "compare.json").read_text(), parse_constant=pytest.fail)
    assert written == json.loads(json.dumps(document))
    for row in written["policies"]:
        assert set(row) == KEYS
        assert set(row["recall_at_100"]) == {"index", "attention"}
        assert set(row["attention_mass"]) == {"mean"} and set(row["output_error"]) == {"mean", "p95"}


def test_references_stand_beside_and_rows_are_sorted_by_error(compared):
    document = compared[0]
    assert {n for n, row in rows(document).items() if row["reference"]} == {
        "full", "full_fp8", "oracle_topk"
    }  # fmt: skip
    errors = [row["output_error"]["mean"] for row in document["policies"]]
    assert errors == sorted(errors)
    assert rows(document)["full"]["read_bytes_per_step"] == document["full_read_bytes_per_step"]


def test_the_target_is_what_the_wave_indexs_defaults_read(trace, compared):
    document = compared[0]
    assert document["target_read_bytes_per_step"] == Comparison(trace, trace.layers).read_bytes(
        get_policy("wave_index")
    )
    wave = rows(document)["wave_index"]
    assert wave["params"] == get_policy("wave_index").parameters() and wave["matched"]


def test_matched_rows_read_the_target_and_others_say_why(trace, compared):
    """Bytes of the windowed layer, the same under every policy, make none of them nearer to the target."""
    document = compared[0]
    target, found = document["target_read_bytes_per_step"], rows(document)
    fixed = Comparison(trace, [2]).read_bytes(get_policy("full"))
    assert document["windowed_layers"] == [2] and 0 < fixed < target
    for row in found.values():
        near = abs(row["read_bytes_per_step"] - target) <= 0.02 * (target - fixed)
        assert row["matched"] == near and bool(row["note"]) == (not near)
    assert found["quest"]["matched"] and found["oracle_topk"]["matched"]
    assert "can't read less" in found["shadowkv"]["note"]
    assert found["shadowkv"]["params"]["sparse_budget"] == 8


def test_settings_reach_the_policy(compared):
    assert rows(compared[0])["shadowkv"]["params"]["outlier_chunks"] == 60


def test_a_row_is_what_evaluating_its_parameters_gives(trace, compared):
    """Every number once more, unit by unit, from :func:`evaluate`; quality without the windowed layer."""
    row = rows(compared[0])["quest"]
    plan = Plan(get_policy("quest", row["params"]))
    errors, recalls, read, scan, index = [], [], [], [], 0
    for sample in range(trace.n_samples):
        (timeline,) = trace.timelines(sample)
        units = [
            evaluate(plan.for_layer(trace.layer_info(n)), timeline.layer(n), timeline.prompt_length)
            for n in trace.layers
        ]
        errors += [unit.error.double().numpy().ravel() for unit in units[:2]]
        recalls += [unit.recall_attention.double().numpy().ravel() for unit in units[:2]]
        read.append(sum(unit.read_bytes.sum(1).double().numpy() for unit in units))
        scan.append(sum(unit.scan_bytes.sum(1).double().numpy() for unit in units))
        pages = timeline.layer(0).keys.shape[1] // 16
        index += 2 * 2 * pages * 2 * 16 * 4  # layers · heads · pages · (low, high) · channels · float32
    assert row["output_error"]["mean"] == pytest.approx(np.concatenate(errors).mean())
    assert row["output_error"]["p95"] == pytest.approx(np.quantile(np.concatenate(errors), 0.95))
    assert row["recall_at_100"]["attention"] == pytest.approx(np.concatenate(recalls).mean())
    assert row["read_bytes_per_step"] == pytest.approx(np.concatenate(read).mean())
    assert row["scan_bytes"] == pytest.approx(np.concatenate(scan).mean())
    assert row["index_bytes"] == index / trace.n_samples


def test_fp8_halves_what_full_attention_reads(compared):
    """Float32 here: a quarter. Windowed layers are stored in it too."""
    found = rows(compared[0])
    assert found["full_fp8"]["read_bytes_per_step"] == found["full"]["read_bytes_per_step"] / 4
    assert found["full"]["output_error"]["mean"] < 1e-5 < found["full_fp8"]["output_error"]["mean"]


def test_given_bytes_are_matched(trace):
    document = compare(trace, ["streaming"], layers=[0], target_bytes=200_000)
    assert document["target"] == "given" and document["layers"] == [0]
    row = rows(document)["streaming"]
    assert row["matched"] and row["read_bytes_per_step"] == pytest.approx(200_000, rel=0.02)
    assert len(document["policies"]) == 4


def test_bytes_that_only_windowed_layers_read_leave_nothing_to_choose(trace):
    fixed = Comparison(trace, trace.layers).fixed_bytes()
    with pytest.raises(InputError, match=f"layers with a window read {fixed:,.0f} bytes"):
        compare(trace, ["streaming"], target_bytes=fixed)


def test_a_trace_of_windowed_layers_alone_can_be_compared(trace):
    document = compare(trace, ["streaming"], layers=[2])
    assert document["windowed_layers"] == [2]
    assert rows(document)["streaming"]["output_error"]["mean"] < 1e-5


def test_turns_and_requests_are_told_apart(tiny_trace):
    """The tiny trace has one request of two turns, nine answer tokens each, in two samples."""
    document = compare(tiny_trace, ["streaming"], target_bytes=9_000)
    for row in document["policies"]:
        assert [(part["request"], part["turn"], part["steps"]) for part in row["by_turn"]] == [
            (0, 0, 18), (0, 1, 18)
        ]  # fmt: skip
        means = [part["output_error"]["mean"] for part in row["by_turn"]]
        assert np.mean(means) == pytest.approx(row["output_error"]["mean"])
        read = [part["read_bytes_per_step"] for part in row["by_turn"]]
        assert np.mean(read) == pytest.approx(row["read_bytes_per_step"])
    full = rows(document)["full"]["by_turn"]
    assert full[0]["read_bytes_per_step"] < full[1]["read_bytes_per_step"]


@pytest.mark.parametrize(
    ("name", "settings"), [("snapkv", {"window": 16}), ("pyramidkv", {"window": 16}), ("h2o", {})]
)
def test_policies_that_evict_share_an_index_and_start_over_on_it(asked, monkeypatch, name, settings):
    kind, builds = type(get_policy(name)), []
    build = kind.build
    monkeypatch.setattr(kind, "build", lambda self, *args: builds.append(1) or build(self, *args))
    row = rows(compare(asked, [name], {name: settings}, layers=[0, 1], target_bytes=120_000))[name]
    assert len(builds) == 2 and row["params"] != get_policy(name, settings).parameters()
    policy, (timeline,) = get_policy(name, row["params"]), asked.timelines(0)
    errors = [evaluate(policy, timeline.layer(n), timeline.prompt_length).error for n in (0, 1)]
    assert row["output_error"]["mean"] == pytest.approx(float(np.mean(errors)), rel=1e-6)


def test_an_index_is_built_once_for_all_budgets(trace, monkeypatch):
    builds = []
    quest = type(get_policy("quest"))
    original = quest.build
    monkeypatch.setattr(quest, "build", lambda self, *args: builds.append(1) or original(self, *args))
    compare(trace, ["quest"], target_bytes=150_000)
    assert len(builds) == 2 * trace.n_samples  # two layers: the third has a window of its own


def test_recall_is_evaluated_at_the_final_setting_only(trace, monkeypatch):
    measured = []
    original = Comparison.evaluate

    def counted(self, policy, *unit, **options):
        measured.append(policy.name)
        return original(self, policy, *unit, **options)

    monkeypatch.setattr(Comparison, "evaluate", counted)
    compare(trace, ["clusterkv"], target_bytes=150_000)
    assert measured.count("clusterkv") == 2 * trace.n_samples


def test_a_policy_that_the_trace_cannot_serve_is_left_out_with_the_reason(trace):
    document = compare(trace, ["snapkv", "streaming"])
    (left,) = document["left_out"]
    assert left["name"] == "snapkv" and "--prompt-queries" in left["reason"]
    with pytest.raises(InputError, match="no prompt queries"):
        compare(trace, ["snapkv"])


def test_live_results_join_the_rows(trace, tmp_path):
    def live(policy):
        if policy.name == "full":
            raise InputError("not today")
        return {"kl": {"mean": 0.25, "p95": 0.5}, "top1": 1.0}

    document = compare(trace, ["streaming"], live=live, out=tmp_path / "out")
    assert rows(document)["streaming"]["kl"]["mean"] == 0.25
    assert "not run live: not today" in rows(document)["full"]["note"]
    assert "live KL" in (tmp_path / "out" / "compare.html").read_text()
    assert document["proxy"] == {"rank_correlation": None, "settings": 2}


def test_the_error_on_the_trace_is_held_to_the_live_order(trace, tmp_path):
    def live(policy):
        return {"kl": {"mean": order[policy.name], "p95": 1.0}}

    order = {"full": 0.0, "oracle_topk": 1.0, "streaming": 2.0, "quest": 3.0}
    document = compare(trace, ["streaming", "quest"], live=live, out=tmp_path / "out")
    errors = {row["name"]: row["output_error"]["mean"] for row in document["policies"] if "kl" in row}
    ranks = sorted(errors, key=errors.__getitem__)
    distance = sum((ranks.index(name) - place) ** 2 for place, name in enumerate(order))
    assert document["proxy"]["settings"] == 4
    assert document["proxy"]["rank_correlation"] == pytest.approx(1 - 6 * distance / (4 * 15))
    assert "rank correlation" in (tmp_path / "out" / "compare.html").read_text()


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (["quests"], {}, "unknown policy 'quests'"),
        (["quest", "quest"], {}, "'quest' is named twice"),
        ([], {}, "no policy to compare"),
        (["quest"], {"layers": [7]}, "layer 7 is not in the trace"),
        (["quest"], {"layers": []}, "no layer is chosen"),
        (["quest"], {"target_bytes": 0.0}, "--read-bytes"),
        (["quest"], {"target_bytes": float("nan")}, "--read-bytes"),
        (["quest"], {"settings": {"quest": {"token_budget": 5}}}, "is the budget of policy 'quest'"),
        (["quest"], {"settings": {"quest": {"page_sice": 5}}}, "unknown parameter"),
        (["quest"], {"settings": {"infllm": {"block": 5}}}, "'infllm', which is not compared"),
    ],
)
def test_bad_input_is_refused(trace, names, options, words):
    with pytest.raises(InputError, match=re.escape(words)) as raised:
        compare(trace, names, **options)
    if names == ["quests"]:
        assert "'quest'" in (raised.value.hint or "")


def test_a_trace_without_values_is_refused(make_trace, tmp_path):
    with pytest.raises(InputError, match="no values"):
        compare(make_trace(tmp_path / "t", with_values=False), ["streaming"])


def test_a_comparison_is_not_overwritten_silently(trace, compared, tmp_path):
    with pytest.raises(InputError, match="exists"):
        compare(trace, ["streaming"], out=compared[1])
    (tmp_path / "notes.txt").write_text("mine")
    compare(trace, ["streaming"], layers=[2], out=tmp_path)
    compare(trace, ["streaming"], layers=[2], out=tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "compare.json", "compare.html"}


def test_the_page_stands_alone_and_names_every_policy(compared):
    document, out = compared
    html = (out / "compare.html").read_text()
    assert "http://" not in html and "https://" not in html and "<script" not in html
    assert html.count("<svg") == html.count("</svg>") >= 6
    for name in rows(document):
        assert html.count(f">{name}<") >= 5
    assert "NaN" not in html and "nan" not in html.replace("</nan", "")


def test_steps_are_those_of_the_trace(trace, compared):
    (timeline,) = trace.timelines(0)
    per_sample = len(decode_queries(timeline.layer(0)).positions)
    assert compared[0]["decode_steps"] == per_sample * trace.n_samples
