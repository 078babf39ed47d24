from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.commands.output import Output, bytes_text, cell, plain, seconds_text


def say_everything(output: Output) -> None:
    def human(out: Output) -> None:
        out.line("a line")
        out.table(["name", "count"], [["full", 3], ["wave_index", 12345]], title="a title")

    output.note("a note")
    output.result({"answer": 42}, human)
    output.closing(Path("some/profile.yaml"), "kvtune profile show some/profile.yaml")


def test_human_mode(capsys):
    say_everything(Output())
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "a line"
    assert "a title" in out and "wave_index" in out and "12,345" in out
    assert out.endswith("wrote some/profile.yaml\nnext: kvtune profile show some/profile.yaml\n")
    assert err == "a note\n"


def test_json_mode_prints_exactly_one_document(capsys):
    say_everything(Output(json=True))
    out, err = capsys.readouterr()
    assert json.loads(out) == {"answer": 42}
    assert err == "a note\n"


def test_quiet_mode_prints_the_path_alone(capsys):
    say_everything(Output(quiet=True))
    assert capsys.readouterr() == ("some/profile.yaml\n", "")


def test_json_and_quiet_is_the_document_alone(capsys):
    say_everything(Output(json=True, quiet=True))
    out, err = capsys.readouterr()
    assert json.loads(out) == {"answer": 42} and err == ""


def test_plain_turns_everything_into_json():
    document = {
        "nan": math.nan,
        "array": np.array([1.5, np.inf]),
        "scalar": np.float32(0.5),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "path": Path("a/b"),
        7: (1, {"x": -math.inf}),
    }
    assert plain(document) == {
        "nan": None,
        "array": [1.5, None],
        "scalar": 0.5,
        "count": 3,
        "flag": True,
        "path": "a/b",
        "7": [1, {"x": None}],
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), json_values, max_size=3))
def test_plain_is_always_strict_json_and_stable(document):
    made = plain(document)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert plain(made) == made


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (True, "yes"),
        (1234567, "1,234,567"),
        (0.123456, "0.1235"),
        (123456.7, "123,457"),
        ("text", "text"),
        (0.0, "0"),
    ],
)
def test_cells(value, text):
    assert cell(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**51, "2048.0 TiB")],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.54, "1.5 s"), (59.94, "59.9 s"), (59.96, "1 min 00 s"), (125, "2 min 05 s"), (4200, "1 h 10 min")],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


def test_no_progress_without_a_terminal(capsys):
    with Output().progress.task("capture", 3) as step:
        for _ in range(3):
            step.advance(note="12 tokens/s")
    assert capsys.readouterr() == ("", "")


def test_piped_lines_are_not_broken(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = "word " * 100 + "end"
    Output().line(text)
    assert capsys.readouterr().out == text + "\n"


def test_columns_is_respected(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    Output().line("word " * 30)
    Output().table(["name", "text"], [["a", "word " * 30]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 6 and max(map(len, lines)) <= 40


def test_numbers_are_set_flush_right(capsys):
    rows = [["full", "1.5 KiB", "100.0%", None], ["wave_index", "10.5 MiB", "-", 1e-6]]
    Output().table(["policy", "size of it", "hit ratio", "error"], rows)
    _, _, first, second, _ = capsys.readouterr().out.splitlines()
    assert first.index("full") == second.index("wave_index")
    assert first.index("KiB") == second.index("MiB")
    assert first.index("100.0%") + 5 == second.index(" - ") + 1
    assert first.rindex("-") == second.index("1e-06") + 4


def test_text_is_never_read_as_markup(capsys):
    Output().line("layers [red]0,5-8[/red] :smile:")
    Output().table(["[bold]a"], [["[/x] 3"]])
    out = capsys.readouterr().out
    assert "layers [red]0,5-8[/red] :smile:" in out and "[bold]a" in out and "[/x] 3" in out
