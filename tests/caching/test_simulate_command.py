from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtune.commands.app import run


def succeed(*arguments: str) -> None:
    assert run(["simulate", *arguments]) == 0


def test_json_has_the_stable_keys(drifting_trace: Path, capsys: pytest.CaptureFixture[str]):
    succeed(str(drifting_trace), "--set", "retrieval=0.05", "--budgets", "0.1,0.02", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["trace"] == str(drifting_trace)
    assert document["cache"] == {"name": "wave", "title": "RetroInfer wave buffer"}
    assert document["policy"]["parameters"]["retrieval"] == 0.05
    assert document["layers"] == [0, 2] and document["units"] == 8 and document["steps"] == 80
    assert [row["budget"] for row in document["curve"]] == [0.02, 0.1]
    for row in document["curve"]:
        assert {"hit_ratio", "warm_hit_ratio", "transfer_bytes_per_step", "truncations"} <= set(row)
        for kind in ("hit_ratio", "warm_hit_ratio"):
            assert set(row[kind]) == {"request", "page", "token"}
            assert all(0 < ratio < 1 for ratio in row[kind].values())
    small, large = document["curve"]
    assert small["transfer_bytes_per_step"] > large["transfer_bytes_per_step"]


def test_plain_lru_is_labelled(drifting_trace: Path, capsys: pytest.CaptureFixture[str]):
    succeed(str(drifting_trace), "--set", "retrieval=0.05", "--cache", "lru", "--layers", "0")
    text = capsys.readouterr().out
    assert text.startswith("plain LRU under wave_index, 4 units")
    assert ("page hits" in text and "MiB" in text) or "KiB" in text
    assert text.splitlines()[-1] == f"next: kvtune tune {drifting_trace}"


def test_a_policy_without_blocks_says_so(drifting_trace: Path, capsys: pytest.CaptureFixture[str]):
    succeed(str(drifting_trace), "--policy", "full", "--json")
    row = json.loads(capsys.readouterr().out)["curve"][0]
    assert row["hit_ratio"] == {"request": None, "page": None, "token": None}
    assert row["transfer_bytes_per_step"] == 0
    succeed(str(drifting_trace), "--policy", "full")
    assert "asks nothing of a cache" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--budgets", "0.1,1.5"], "error: --budgets: 1.5 lies outside (0, 1]"),
        (["--budgets", "0"], "error: --budgets: 0 lies outside (0, 1]"),
        (["--budgets", "ten"], "error: --budgets cannot be read at 'ten'"),
        (["--cache", "wav"], "error: unknown cache 'wav'"),
        (["--policy", "wave_indx"], "error: unknown policy 'wave_indx'"),
        (["--set", "retreival=1"], "error: unknown parameter of policy 'wave_index' 'retreival'"),
        (["--layers", "1"], "error: the trace has no layer 1"),
        (["--layers", "3"], "error: layer 3 is out of range"),
    ],
)
def test_bad_input_is_one_sentence(
    drifting_trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
):
    assert run(["simulate", str(drifting_trace), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[0] == sentence and len(err.splitlines()) <= 2


def test_a_missing_trace_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["simulate", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
