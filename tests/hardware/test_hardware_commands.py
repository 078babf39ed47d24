"""``kvtune calibrate`` and ``kvtune simulate --hardware``: documents, tables, and bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from machines import machine
from test_calibrate import SMALL

from kvtune.commands.app import run
from kvtune.hardware import TERMS, read_hardware, save_hardware
from kvtune.profiles.hardware_presets import load_hardware


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Calibrations of small sizes, in a folder of their own."""
    monkeypatch.setattr(sys.modules["kvtune.hardware.calibrate"], "ON_CPU", SMALL)
    monkeypatch.chdir(tmp_path)


def test_calibrate_writes_what_simulate_reads(quick, clustered_trace, capsys):
    assert run(["calibrate", "--device", "cpu", "--name", "mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mine: ") and any("matrix products" in line for line in lines)
    assert lines[-2:] == ["wrote mine.yaml", "next: kvtune simulate TRACE --hardware mine.yaml"]
    assert load_hardware("mine.yaml").name == "mine"
    assert run(["simulate", str(clustered_trace), "--hardware", "mine.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["offload"] == "none" and document["hardware"]["source"]["kind"] == "measured"


def test_calibrate_as_json_is_the_file(quick, capsys):
    assert run(["calibrate", "--device", "cpu", "--out", "folder/m.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == read_hardware("folder/m.yaml").model_dump(mode="json")
    assert document["source"]["kind"] == "measured" and document["host_to_device"] is None


def test_calibrate_names_and_overwrites(quick, capsys):
    Path("kept.yaml").write_text("mine", encoding="utf-8")
    assert run(["calibrate", "--device", "cpu", "--out", "kept.yaml"]) == 2
    assert "error: kept.yaml exists" in capsys.readouterr().err
    assert Path("kept.yaml").read_text(encoding="utf-8") == "mine"
    assert run(["calibrate", "--device", "cpu", "--out", "kept.yaml", "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr().out == "kept.yaml\n"
    hardware = read_hardware("kept.yaml")
    assert run(["calibrate", "--device", "cpu", "--quiet"]) == 0
    assert capsys.readouterr().out == f"{hardware.name}.yaml\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--device", "tpu9"), "error: device 'tpu9' is not available here"),
        (("--device", "cpu", "--name", ""), "error: the hardware's name must not be empty"),
        (("--device", "cpu", "--out", "."), "error: . is a folder, not a file"),
        (("--device", "cpu", "--out", "file/m.yaml"), "error: file is not a folder"),
    ],
)
def test_calibrate_bad_input(quick, capsys, options, sentence):
    Path("file").write_text("", encoding="utf-8")
    assert run(["calibrate", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[0] == sentence and len(err.splitlines()) <= 2


def test_a_prediction_in_every_row(clustered_trace, capsys):
    arguments = ["simulate", str(clustered_trace), "--budgets", "0.05,0.2", "--json"]
    assert run(arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*arguments, "--hardware", "H200", "--batch", "8", "--parameters", "8e9"]) == 0
    document = json.loads(capsys.readouterr().out)
    for before, row in zip(plain["curve"], document["curve"], strict=True):
        assert {key: row[key] for key in before} == before
        assert tuple(row["step"]["terms"]) == TERMS
        summed = sum(row["step"]["terms"].values()) - row["step"]["hidden_ms"]
        assert row["step"]["total_ms"] == pytest.approx(summed)
        assert row["step"]["bound_by"] in ("device memory", "PCIe", "compute", "launch")
        assert row["tokens_per_second"] == pytest.approx(8e3 / row["step"]["total_ms"])
        assert row["max_batch"] > 0 and row["gpu_bytes"]["total"] > 0
    assert document["weights"] == {"bytes": 32e9, "source": "given"}
    assert document["batch"] == 8 and document["offload"] == "cpu" and document["dtype"] == "float32"
    assert document["full"]["step"]["total_ms"] > 0
    assert {key: document[key] for key in plain if key != "curve"} == {
        key: plain[key] for key in plain if key != "curve"
    }


def test_the_table_and_the_closing_sentence(clustered_trace, capsys):
    assert run(["simulate", str(clustered_trace), "--hardware", "a100-80gb", "--batch", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("On a100-80gb (data sheet): batch 4, 1,504 tokens, float32") for line in lines)
    header = next(place for place, line in enumerate(lines) if line.split() == ["term", "ms", "bytes"])
    terms = [line.strip() for line in lines[header + 2 : lines.index("", header)]]
    assert [line.split("  ")[0] for line in terms] == [
        "index scan", "top-k", "id copy", "estimation", "cache lookup", "miss transfer",
        "exact attention and merge", "cache scatter", "new key and value", "fixed, by layer",
        "projections and MLP", "launches", "side by side with another term", "step",
    ]  # fmt: skip
    closing = lines[-2]
    assert closing.startswith("Launch bounds the step (") and "full attention would take" in closing
    assert "wave_index is " in closing and "x as fast here" in closing
    assert lines[-1].startswith("next: kvtune tune ")


def test_a_batch_that_does_not_fit_is_said(clustered_trace, tmp_path, capsys):
    save_hardware(machine(), tmp_path / "small.yaml")
    batch = ["--batch", "100000", "--parameters", "1e9"]
    assert run(["simulate", str(clustered_trace), "--hardware", str(tmp_path / "small.yaml"), *batch]) == 0
    assert "(but batch 100000 does not fit: at most " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--hardware", "h300"), "error: unknown hardware 'h300'"),
        (("--hardware", "none.yaml"), "error: there is no hardware file none.yaml"),
        (("--hardware", "h200", "--batch", "0"), "error: --batch must be 1 or more, not 0"),
        (("--hardware", "h200", "--offload", "disk"), "error: unknown offload 'disk'"),
        (("--hardware", "h200", "--parameters", "0"), "error: --parameters must be above 0, not 0"),
        (("--hardware", "h200", "--parameters", "nan"), "error: --parameters must be above 0, not nan"),
        (("--hardware", "h200", "--layers", "7"), "error: layer 7 is out of range"),
        (("--batch", "2"), "error: --batch goes with --hardware"),
        (("--offload", "none"), "error: --offload goes with --hardware"),
        (("--parameters", "1e9"), "error: --parameters goes with --hardware"),
    ],
)
def test_simulate_bad_input(clustered_trace, capsys, options, sentence):
    assert run(["simulate", str(clustered_trace), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[0] == sentence and len(err.splitlines()) <= 2
