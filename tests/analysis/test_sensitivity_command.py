"""``kvtune analyze --sensitivity`` on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvtune.commands.analyze import default_out


@pytest.fixture
def trace(tiny_trace, tmp_path) -> Path:
    """A trace of one's own, so that outputs beside it stay apart."""
    return Path(shutil.copytree(tiny_trace, tmp_path / "tiny"))


def test_the_tables_fit_a_terminal_and_name_the_plan(cli, trace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = cli("analyze", trace, "--sensitivity")
    assert ran.exit_code == 0, ran.err
    assert max(len(line) for line in ran.out.splitlines() if str(trace) not in line) <= 80
    for words in ("kivi2", "keys alone", "Plan: ", "native", "wrote", "next: kvtune"):
        assert words in ran.out
    assert (default_out(trace) / "sensitivity.json").is_file()


def test_it_lies_beside_an_analysis_and_is_not_overwritten(cli, trace):
    policy = ("--policy", "oracle_topk", "--set", "tokens=12", "--set", "local=6")
    assert cli("analyze", trace, *policy).exit_code == 0
    assert cli("analyze", trace, "--sensitivity", "--precisions", "int4").exit_code == 0
    again = cli("analyze", trace, "--sensitivity", "--precisions", "int4")
    assert again.exit_code == 2 and "exists" in again.err and "--overwrite" in again.err
    assert cli("analyze", trace, "--sensitivity", "--precisions", "int4", "--overwrite").exit_code == 0
    assert {"summary.json", "sensitivity.json"} <= {path.name for path in default_out(trace).iterdir()}


def test_json_is_one_document(cli, trace):
    ran = cli("analyze", trace, "--sensitivity", "--precisions", "fp8, kivi2", "--layers", "0-1", "--json")
    document = json.loads(ran.out, parse_constant=pytest.fail)
    assert list(document["precisions"]) == ["fp8", "kivi2"]
    assert len(document["heads"]) == 8 and len(document["plan"]["native_heads"]) == 1
    assert json.loads(Path(document["files"]["sensitivity"]).read_text())["heads"] == document["heads"]


def test_quiet_prints_the_folder_alone(cli, trace, tmp_path):
    ran = cli("analyze", trace, "--sensitivity", "--precisions", "int8", "-q", "--out", tmp_path / "here")
    assert ran.out == f"{tmp_path / 'here'}\n"


def test_the_options_of_the_plan_reach_it(cli, trace):
    options = ("--target-drop", "1", "--max-error", "0.5", "--precisions", "int8", "--json")
    plan = json.loads(cli("analyze", trace, "--sensitivity", *options).out)["plan"]
    assert plan["output_error"]["mixed"] == 0 and plan["max_error"] == 0.5 and plan["within_max_error"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sensitivity", "--precisions", "fp9"), "did you mean 'fp8'"),
        (("--sensitivity", "--precisions", ","), "no precision"),
        (("--sensitivity", "--layers", "0-7"), "layer 7"),
        (("--sensitivity", "--device", "cuda:99"), "device 'cuda:99'"),
        (("--sensitivity", "--native-share", "2"), "native share"),
        (("--sensitivity", "--policy", "full"), "leave out --policy"),
        (("--sensitivity", "--set", "tokens=4"), "leave out --policy"),
        (("--precisions", "fp8"), "--precisions goes with --sensitivity"),
        (("--target-drop", "0.5"), "--target-drop goes with --sensitivity"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(cli, trace, arguments, words):
    ran = cli("analyze", trace, *arguments)
    assert ran.exit_code == 2
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert not default_out(trace).exists()
