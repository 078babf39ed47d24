from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvtune.commands.analyze import default_out

SETTINGS = ("--policy", "oracle_topk", "--set", "tokens=12", "--set", "local=6", "--layers", "0-1")


@pytest.fixture
def trace(tiny_trace, tmp_path) -> Path:
    """A trace of one's own, so that outputs beside it stay apart."""
    return Path(shutil.copytree(tiny_trace, tmp_path / "tiny"))


def test_the_summary_fits_a_terminal_and_says_what_to_do_next(cli, trace, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = cli("analyze", trace, *SETTINGS)
    assert ran.exit_code == 0, ran.err
    assert max(len(line) for line in ran.out.splitlines() if str(trace) not in line) <= 80
    for words in (
        "query cosine",
        "overlap@100",
        "Output error",
        "adjacent queries",
        "wrote",
        "next: kvtune simulate",
    ):
        assert words in ran.out
    assert (default_out(trace) / "report.html").is_file()


def test_a_precision_is_named_where_the_policy_is(cli, trace):
    ran = cli("analyze", trace, *SETTINGS, "--precision", "int8")
    assert ran.exit_code == 0, ran.err
    assert "oracle_topk in int8 against it" in ran.out
    page = (default_out(trace) / "report.html").read_text(encoding="utf-8")
    assert "KV in int8" in page


def test_json_is_one_document_without_nan(cli, trace, tmp_path):
    ran = cli("analyze", trace, *SETTINGS, "--json", "--out", tmp_path / "here")
    document = json.loads(ran.out, parse_constant=pytest.fail)
    assert document["policy"]["parameters"]["tokens"] == 12
    assert document["layers"][1]["layer"] == 1
    assert Path(document["files"]["summary"]).is_file()


def test_quiet_prints_the_folder_alone(cli, trace, tmp_path):
    ran = cli("analyze", trace, *SETTINGS, "--quiet", "--out", tmp_path / "here")
    assert ran.out == f"{tmp_path / 'here'}\n"


def test_nothing_is_overwritten_silently(cli, trace):
    assert cli("analyze", trace, *SETTINGS).exit_code == 0
    again = cli("analyze", trace, *SETTINGS)
    assert again.exit_code == 2
    assert "exists" in again.err and "--overwrite" in again.err
    assert cli("analyze", trace, *SETTINGS, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layers", "0-7"), "layer 7"),
        (("--policy", "oracle_topc"), "oracle_topk"),
        (("--set", "tokns=4"), "tokns"),
        (("--set", "retrieval=2"), "retrieval"),
        (("--seed", "-1"), "seed"),
        (("--precision", "fp9"), "did you mean 'fp8'"),
        (("--precision", "int4", "--sensitivity"), "--precision goes with one policy"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(cli, trace, arguments, words):
    ran = cli("analyze", trace, *arguments)
    assert ran.exit_code == 2
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert not default_out(trace).exists()


def test_a_missing_and_a_foreign_trace(cli, tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        ran = cli("analyze", path)
        assert ran.exit_code == 2
        assert str(path) in ran.err


def test_the_default_folder_lies_beside_the_trace(monkeypatch, tmp_path):
    assert default_out(Path("traces/a")) == Path("traces/a-analysis")
    monkeypatch.chdir(tmp_path)
    assert default_out(Path(".")) == tmp_path.with_name(f"{tmp_path.name}-analysis")
