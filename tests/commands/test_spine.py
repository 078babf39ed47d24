"""The whole line on the packaged model, through the command line: each step one JSON document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.model


@pytest.fixture
def document(cli):
    """``document("analyze", path)`` runs a command with --json and gives what it printed."""

    def call(*arguments: object):
        ran = cli(*arguments, "--json")
        assert ran.exit_code == 0, ran.err
        assert "NaN" not in ran.out and "Infinity" not in ran.out
        return json.loads(ran.out)

    return call


def has(found, *keys: str) -> bool:
    """Whether ``found`` has all of ``keys``; a dot goes down one level."""
    for key in keys:
        place = found
        for part in key.split("."):
            assert part in place, f"{key} is missing"
            place = place[part]
    return True


def test_capture(document, smollm2, tmp_path):
    trace = tmp_path / "own.trace"
    text = tmp_path / "own.txt"
    text.write_text("The keys of a cache are vectors, and so are the values. " * 12, encoding="utf-8")
    found = document(
        "capture", "smollm2-135m", "--prompts", text, "--decode", 3, "--layers", "0,29", "--out", trace
    )
    assert has(
        found, "trace", "samples", "requests", "units", "tokens", "decode_steps", "seconds", "bytes", "score"
    )
    assert found["trace"] == str(trace) and found["samples"] == 1 and found["units"] == 2 * 3
    assert 1 <= found["decode_steps"] <= 3


def test_analyze(document, smollm2_trace, tmp_path):
    found = document("analyze", smollm2_trace, "--layers", "0,15", "--out", tmp_path / "analysis")
    assert has(found, "query_cosine.lag1.mean", "query_cosine.lag1.p10", "query_cosine.lag1.p50")
    assert has(found, "query_cosine.lag1.p90", "overlap_at_100.lag1.mean", "recall_at_100.index")
    assert has(
        found, "recall_at_100.attention", "attention_mass.mean", "output_error.mean", "output_error.p50"
    )
    assert has(found, "output_error.p95", "effective_tokens", "read_bytes_per_step", "layers")
    assert 0 < found["output_error"]["mean"] < 1 and len(found["layers"]) == 2
    page = (tmp_path / "analysis" / "report.html").read_text(encoding="utf-8")
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


def test_simulate(document, smollm2_trace):
    found = document("simulate", smollm2_trace, "--budgets", "0.05,0.2", "--layers", "0,15")
    assert [row["budget"] for row in found["curve"]] == [0.05, 0.2]
    for row in found["curve"]:
        assert has(row, "hit_ratio.request", "hit_ratio.page", "hit_ratio.token", "warm_hit_ratio.page")
        assert has(row, "transfer_bytes_per_step", "truncations")
    small, large = (row["hit_ratio"]["page"] for row in found["curve"])
    assert 0 <= small <= large <= 1


def test_tune_profile_and_live(document, smollm2_trace, tmp_path):
    study = tmp_path / "study"
    found = document("tune", smollm2_trace, "--trials", 3, "--layers", "0,15", "--uniform", "--out", study)
    assert has(found, "profile", "pareto", "chosen", "default", "held_out.chosen", "held_out.default")
    assert has(found, "trials.complete", "trials.pruned", "trials.failed")
    for row in (*found["pareto"], found["chosen"], found["default"]):
        assert has(row, "params", "output_error.mean", "output_error.p95", "read_bytes_per_step", "hit_ratio")
    profile = Path(found["profile"])
    assert yaml.safe_load(profile.read_text(encoding="utf-8"))["model"]["id"] == "smollm2-135m"

    assert document("profile", "show", profile)["profile"] == str(profile)
    assert document("profile", "validate", profile, "--trace", smollm2_trace)["valid"] is True
    assert document("profile", "diff", profile, profile)["changes"] == []
    for engine in ("retroinfer", "transformers"):
        exported = document("profile", "export", profile, "--engine", engine, "--out", tmp_path / engine)
        assert has(exported, "engine", "engine_version", "files", "not_expressible")
        assert all(Path(file).is_file() for file in exported["files"])

    lived = document(
        "live",
        "smollm2-135m",
        "--profile",
        profile,
        "--context",
        1200,
        "--decode",
        4,
        "--task",
        "niah_single",
    )
    assert has(lived, "kl.mean", "kl.p95", "delta_nll.mean", "delta_nll.low", "delta_nll.high", "top1")
    assert has(
        lived, "hit_ratio.page", "replayed_hit_ratio.page", "tokens_per_second", "full_tokens_per_second"
    )
    assert 0 <= lived["hit_ratio"]["page"] <= 1 and lived["hit_ratio"] == lived["replayed_hit_ratio"]


def test_infeasible_is_exit_3_and_writes_no_profile(cli, smollm2_trace, tmp_path):
    limits = ("--max-error", "1e-9", "--max-read-bytes", "1")
    out = ("--layers", "0", "--out", tmp_path / "study", "--json")
    ran = cli("tune", smollm2_trace, "--trials", 2, *limits, *out)
    assert ran.exit_code == 3 and ran.out == ""
    assert json.loads(ran.err)["exit_code"] == 3
    assert not (tmp_path / "study" / "profile.yaml").exists()


def test_nothing_is_overwritten_silently(cli, smollm2_trace, tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "mine.txt").write_text("keep me", encoding="utf-8")
    for command in (
        ("capture", "smollm2-135m", "--context", 300, "--out", folder),
        ("analyze", smollm2_trace, "--out", folder),
        ("tune", smollm2_trace, "--trials", 1, "--out", folder),
    ):
        ran = cli(*command)
        assert ran.exit_code == 2 and ran.out == "", command
        assert [path.name for path in folder.iterdir()] == ["mine.txt"]
