from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from kvtune.commands import demo
from kvtune.commands.app import build
from kvtune.errors import RunError

SCORE = {"output_error": {"mean": 0.05, "p50": 0.04, "p95": 0.2}, "read_bytes_per_step": 123456.0}
DOCUMENTS = {
    "capture": {
        "samples": 4,
        "tokens": 9000,
        "decode_steps": 64,
        "bytes": 2**20,
        "score": {"niah_single": 0.5},
    },
    "analyze": {
        "query_cosine": {"lag1": {"mean": 0.8}},
        "overlap_at_100": {"lag1": {"mean": 0.6}},
        "attention_mass": {"mean": 0.9},
        **SCORE,
    },
    "simulate": {"curve": [{"budget": 0.05, "hit_ratio": {"page": 0.85}}]},
    "tune": {
        "held_out": {"chosen": SCORE, "default": SCORE, "winner": "tie"},
        "trials": {"complete": 20, "pruned": 0, "failed": 0},
    },
    "live": {
        "kl": {"mean": 0.01},
        "delta_nll": {"mean": 0.02, "low": -0.01, "high": 0.05},
        "top1": 0.97,
        "hit_ratio": {"page": 0.8},
        "replay_equal": True,
    },
    "profile": {"engine": "retroinfer", "engine_version": "v1", "files": ["a", "b"], "not_expressible": [{}]},
}


@pytest.fixture
def typed(monkeypatch):
    """Command lines that the demo ran; each is answered with a document as the command prints it."""
    lines: list[list[str]] = []

    def invoke(arguments: list[str]) -> None:
        lines.append(arguments)
        typer.echo(json.dumps(DOCUMENTS[arguments[0]]))

    monkeypatch.setattr(demo, "invoke", invoke)
    return lines


def test_it_walks_the_whole_line(cli, typed, tmp_path):
    ran = cli("demo", "--out", tmp_path / "demo")
    assert ran.exit_code == 0 and ran.err == ""
    walked = [line[0] for line in typed]
    assert walked == ["capture", "capture", "analyze", "simulate", "tune", "live", "profile", "profile"]
    shown = [line for line in ran.out.splitlines() if line.startswith("$ kvtune ")]
    assert [line.split()[2] for line in shown] == walked
    assert f"profile  {tmp_path / 'demo' / 'study' / 'profile.yaml'}\n" in ran.out
    assert f"report   {tmp_path / 'demo' / 'analysis' / 'report.html'}" in ran.out
    assert "neither wins; 20 trials" in ran.out and "replay: equal" in ran.out


def test_one_json_document(cli, typed, tmp_path):
    ran = cli("demo", "--out", tmp_path / "demo", "--json")
    document = json.loads(ran.out)
    assert document["profile"] == str(tmp_path / "demo" / "study" / "profile.yaml")
    assert [step["result"] for step in document["steps"]] == [DOCUMENTS[line[0]] for line in typed]


def test_quiet_prints_the_folder(cli, typed, tmp_path):
    assert cli("demo", "--out", tmp_path / "demo", "--quiet").out == f"{tmp_path / 'demo'}\n"


def test_it_never_overwrites_silently(cli, typed, tmp_path):
    ran = cli("demo", "--out", tmp_path)
    assert ran.exit_code == 2 and "exists already" in ran.err and typed == []
    assert cli("demo", "--out", tmp_path, "--overwrite").exit_code == 0
    assert all(
        "--overwrite" in line for line in typed if line[0] in ("capture", "analyze", "tune", "profile")
    )


def test_a_failing_step_fails_the_demo(cli, monkeypatch, tmp_path):
    def invoke(arguments):
        raise RunError("the disk is full")

    monkeypatch.setattr(demo, "invoke", invoke)
    ran = cli("demo", "--out", tmp_path / "demo")
    assert ran.exit_code == 1 and ran.err == "error: the disk is full\n"


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_commands_take_what_the_demo_types(overwrite):
    for step in demo.steps(Path("demo"), overwrite):
        words = [*step.arguments, "--json"]
        command = typer.main.get_command(build([words[0]]))
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context("kvtune", words)
