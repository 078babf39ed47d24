"""``kvtune live`` on the command line, on a tiny model in a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from kvtune.commands.live_output import show_batch
from kvtune.commands.options import parse_sweep
from kvtune.errors import InputError
from kvtune.hardware import TERMS, save_hardware
from kvtune.hardware.calibrate import device_title
from kvtune.profiles.hardware_presets import load_hardware
from kvtune.runtime.torch_engine import TorchEngine
from kvtune.traces import open_trace


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """Two prompts of 60 words with a reference each."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    words = [" ".join(f"w{3 + (7 * n + s) % 90}" for n in range(60)) for s in (0, 1)]
    file.write_text("".join(json.dumps({"prompt": w, "reference": "w5 w9"}) + "\n" for w in words))
    return file


@pytest.fixture
def live(cli, model, prompts):
    """``live("--decode", 3)`` on both prompts under Quest, which selects among 60 tokens."""
    fixed = ("--prompts", prompts, "--policy", "quest", "--set", "token_budget=24", "--set", "page_size=8")
    return lambda *arguments: cli("live", model, *fixed, "--decode", 3, *arguments)


def test_people_read_measured_beside_predicted(live):
    ran = live("--cache-fraction", 0.3)
    assert ran.exit_code == 0, ran.err
    for words in (
        "torch engine",
        "predicted",
        "full attention",
        "page hit ratio, free",
        "equal",
        "GPU bytes",
    ):
        assert words in ran.out


def test_sliding_layers_are_told(live, cli, prompts, tmp_path):
    assert "sliding" not in live("--no-free").out
    tiny_model("gemma3").save_pretrained(tmp_path / "hybrid")
    tiny_tokenizer().save_pretrained(tmp_path / "hybrid")
    ran = cli(
        "live", tmp_path / "hybrid", "--prompts", prompts, "--policy", "quest", "--decode", 2, "--no-free"
    )
    assert ran.exit_code == 0, ran.err
    assert "\n2 sliding layers stay dense in their window\n" in ran.out


def test_json_is_the_document(live):
    ran = live("--json", "--no-free", "--offload", "cpu")
    document = json.loads(ran.out)
    assert document["engine"] == "torch" and document["offload"] == "none" and document["requests"] == 2
    assert document["forecast_hit_ratio"]["free"] is None
    assert "--offload cpu has no effect" in ran.err and document["notes"]


def test_a_step_is_predicted_on_a_machine(live, tmp_path):
    ran = live("--hardware", "H200", "--no-free")
    assert ran.exit_code == 0, ran.err
    (told,) = [
        line for line in ran.out.splitlines() if line.startswith("decode step, median ") and "," in line[20:]
    ]
    assert " ms on h200 (measured), which is not the machine measured on (" in told
    assert "predicted terms on h200" in ran.out and "projections and MLP" in ran.out
    document = json.loads(live("--hardware", "h200", "--no-free", "--json").out)
    terms, hidden = document["predicted_terms_ms"], document["predicted_hidden_ms"]
    assert set(terms) == set(TERMS) and document["predicted_step_ms"] == pytest.approx(
        sum(terms.values()) - hidden
    )
    assert document["hardware"]["device"] == "NVIDIA H200" and document["hardware"]["same_machine"] is False
    ran = live("--hardware", "h200", "--sweep", "budget=24,40", "--out", tmp_path / "s", "--json")
    rows = json.loads(ran.out)["rows"]
    assert 0 < rows[0]["predicted_step_ms"] < rows[1]["predicted_step_ms"]
    ran = live("--hardware", "h200", "--sweep", "budget=24,40", "--out", tmp_path / "t")
    assert "Predicted steps: h200 (measured), which is not" in ran.out


def test_a_machine_of_ones_own(live, cli, tmp_path):
    """A calibrated file describes this machine: the prediction is for it."""
    mine = load_hardware("l40s").model_copy(
        update={"name": "mine", "device": device_title(torch.device("cpu"))}
    )
    save_hardware(mine, tmp_path / "mine.yaml")
    ran = live("--hardware", tmp_path / "mine.yaml", "--no-free")
    assert " ms on mine (data sheet)\n" in ran.out, ran.err


def test_turns_and_scores_are_shown(cli, live, prompts, tmp_path):
    ran = live("--json")
    (score,) = json.loads(ran.out)["score"].values()
    assert score["n"] == 2 and score["note"]
    assert "score of" in live().out


def test_a_batch_is_told_in_two_lines(cli, model, prompts):
    pytest.importorskip("triton")
    asked = ("--policy", "streaming", "--decode", 1, "--no-free", "--engine", "fused", "--batch", 3)
    ran = cli("live", model, "--prompts", prompts, *asked)
    assert ran.exit_code == 0, ran.err
    told, held = ran.out.splitlines()[-2:]
    assert re.match(r"3 sequences together, 60 tokens: [\d,.]+ ms a step, [\d,]+ tokens/s", told)
    assert held.endswith("% of the tokens as each decodes alone") and "on the GPU" in held
    assert "the batch of 3 takes 2 prompts in turn" in ran.err


def test_a_batch_is_told_beside_full_attention():
    """As a GPU measures it."""
    times = {"step_ms": {"p50": 2.31}, "full_step_ms": {"p50": 4.02}, "predicted_step_ms": 2.2}
    rates = {"tokens_per_second": 3460.0, "full_tokens_per_second": 1990.0}
    held = {"gpu_bytes": {"total": 1 << 30, "full_kv": 3 << 30}, "host_bytes": 2 << 30, "same_tokens": 0.975}
    lines: list[str] = []
    show_batch(
        SimpleNamespace(line=lines.append), {"size": 8, "lengths": [6101, 5012], **times, **rates, **held}
    )
    assert lines == [
        "8 sequences together, 5,012–6,101 tokens: 2.31 ms a step, 3,460 tokens/s, predicted 2.2 ms; full "
        "attention 4.02 ms, 1,990 tokens/s (1.74x)",
        "1.0 GiB on the GPU, 2.0 GiB on the host (full attention 3.0 GiB); 97.5% of the tokens as each "
        "decodes alone",
    ]


def test_record_writes_a_trace_to_analyse(live, cli, tmp_path):
    ran = live("--record", tmp_path / "t")
    assert ran.exit_code == 0 and f"next: kvtune analyze {tmp_path / 't'}" in ran.out, ran.err
    trace = open_trace(tmp_path / "t", verify=True)
    assert trace.manifest["approximated"]["parameters"]["token_budget"] == 24
    assert cli("analyze", tmp_path / "t").exit_code == 0
    assert live("--record", tmp_path / "t").exit_code == 2
    assert live("--record", tmp_path / "t", "--overwrite").exit_code == 0


def test_sweep_writes_curves(live, tmp_path):
    ran = live("--sweep", "budget=24,40", "--out", tmp_path / "s")
    assert ran.exit_code == 0 and "token_budget" in ran.out and "predicted" in ran.out, ran.err
    assert (tmp_path / "s" / "sweep.html").is_file()
    ran = live("--sweep", "cache=0.1,0.5", "--out", tmp_path / "c", "--json")
    document = json.loads(ran.out)
    assert [row["value"] for row in document["rows"]] == [0.1, 0.5]
    assert document["files"]["page"] == str(tmp_path / "c" / "sweep.html")
    assert live("--sweep", "cache=0.1", "--out", tmp_path / "c").exit_code == 2


def test_an_interruption_is_130_with_what_is_done(live, monkeypatch):
    step, steps = TorchEngine.step, []

    def stopped(self, token):
        steps.append(token)
        if self.timings.index_build and len(steps) > 30:
            raise KeyboardInterrupt
        return step(self, token)

    monkeypatch.setattr(TorchEngine, "step", stopped)
    ran = live("--json", "--no-free", "--decode", 10)
    assert ran.exit_code == 130
    document = json.loads(ran.out)
    assert document["interrupted"] is True and document["answers"] == 1
    assert "answers finished so far" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "warp"), "unknown engine 'warp'"),
        (("--engine", "warp", "--record", "x"), "unknown engine 'warp'"),
        (("--offload", "disk"), "--offload is none or cpu"),
        (("--device", "cuda:77"), "not available here"),
        (("--out", "x"), "--out goes with --sweep"),
        (("--sweep", "budget"), "is not NAME=V1,V2"),
        (("--sweep", "budget=1,,2"), "is not NAME=V1,V2"),
        (("--sweep", "colour=1,2"), "unknown parameter"),
        (("--sweep", "budget=24", "--record", "x"), "exclude each other"),
        (("--batch", 2, "--sweep", "budget=24"), "--batch and --sweep exclude each other"),
        (("--batch", 0), "'--batch'"),
        (("--batch", 2, "--engine", "torch"), "which --engine torch rules out"),
        (("--batch", 2, "--device", "cpu"), "--batch decodes by the fused engine, which needs a CUDA device"),
        (("--decode", 0), "--decode must be at least 1"),
        (("--decode", 400), "longest timeline"),
        (("--cache-fraction", 2), "outside"),
        (("--hardware", "h201"), "unknown hardware 'h201'"),
        (("--hardware", "no/such.yaml"), "no/such.yaml"),
    ],
)
def test_bad_input_is_one_sentence(live, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    ran = live(*arguments)
    assert ran.exit_code == 2 and ran.out == "" and said in ran.err
    assert ran.err.startswith("error: ") and len(ran.err.splitlines()) <= 2
    assert not any(tmp_path.iterdir())


def test_a_sweep_is_read_as_name_and_values():
    assert parse_sweep("budget = 0.01, 2,all, 2") == ("budget", [0.01, 2, "all"])
    with pytest.raises(InputError):
        parse_sweep("=1")
