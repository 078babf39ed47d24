"""What a user gets wrong: one sentence, exit 2, nothing written."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
from tiny_models import tiny_model, tiny_tokenizer

from kvtune.commands.app import run


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A random model of 3 layers, 2 kv heads and 256 positions, as a folder."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trace(model, tmp_path_factory) -> Path:
    """A trace of that model: two prompts of 40 words, 4 decode steps at most."""
    folder = tmp_path_factory.mktemp("trace")
    words = " ".join(f"w{3 + number % 90}" for number in range(40))
    prompts = folder / "prompts.jsonl"
    prompts.write_text(f"{json.dumps({'prompt': words})}\n" * 2, encoding="utf-8")
    before = dict(os.environ)
    code = run(
        ["capture", str(model), "--prompts", str(prompts), "--decode", "4", "--out", str(folder / "t")]
    )
    os.environ.clear()
    os.environ.update(before)
    logging.disable(logging.NOTSET)
    assert code == 0
    return folder / "t"


@pytest.fixture
def refused(cli, tmp_path):
    """``refused("analyze", …)`` must exit with 2 and one sentence, which it gives; nothing is written."""

    def call(*arguments: object, out: bool = True) -> str:
        target = tmp_path / "out"
        ran = cli(*arguments, *(("--out", target) if out else ()))
        assert ran.exit_code == 2 and ran.out == "", ran
        first, *rest = ran.err.splitlines()
        assert first.startswith("error: ") and len(rest) <= 1 and "Traceback" not in ran.err
        assert all(line.startswith("hint: ") for line in rest)
        assert not target.exists() or not any(target.iterdir())
        return ran.err

    return call


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--task", "niah_singel"), "unknown task 'niah_singel'\nhint: did you mean 'niah_single'?"),
        (("--context", "0"), "--context"),
        (("--context", "-5"), "--context"),
        (("--samples", "0"), "--samples"),
        (("--requests", "0"), "--requests"),
        (("--turns", "0"), "--turns"),
        (("--decode", "0"), "--decode"),
        (("--context", "100000"), "256"),
        (("--layers", "3"), "layer 3 is out of range"),
        (("--layers", "x"), "--layers"),
        (("--kv-heads", "2"), "kv head 2 is out of range"),
        (("--rope", "yarn"), "rope"),
        (("--rope", "spiral:4"), "spiral"),
        (("--context", "90", "--device", "tpu9"), "tpu9"),
        (("--context", "90", "--dtype", "float31"), "unknown dtype 'float31'\nhint: did you mean 'float32'?"),
        (("--prompt-queries", "some"), "--prompt-queries"),
        (("--prompts", "missing.txt"), "missing.txt"),
        (("--prompts", "missing.txt", "--task", "niah_single"), "exclude"),
        (("--seed", "-1"), "seed"),
    ],
)
def test_capture_options(refused, model, options, said):
    assert said in refused("capture", model, *options)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "empty"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "UTF-8"),
        ("bad.jsonl", b'{"prompt": "w3"}\n{"prompt": \n', "line 2"),
        ("other.jsonl", b'{"prompt": "w3"}\n\n{"text": "w3"}\n', "line 3"),
        ("prompts.csv", b"prompt\nw3\n", "prompts.csv"),
    ],
)
def test_prompt_files(refused, model, tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    assert said in refused("capture", model, "--prompts", path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'?"),
        ("./no/such/folder", "no/such/folder"),
        ("model.gguf", "model.gguf"),
    ],
)
def test_models(refused, name, said):
    assert said in refused("capture", name)


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        (
            "analyze",
            ("--policy", "wave_indx"),
            "unknown policy 'wave_indx'\nhint: did you mean 'wave_index'?",
        ),
        ("analyze", ("--set", "snik=4"), "did you mean 'sink'?"),
        ("analyze", ("--set", "sink"), "KEY=VALUE"),
        ("analyze", ("--set", "sink=many"), "sink"),
        ("analyze", ("--set", "sink=-1"), "sink"),
        ("analyze", ("--layers", "7"), "layer 7 is out of range"),
        ("tune", ("--policy", "wave_indx"), "unknown policy"),
        ("tune", ("--trials", "0"), "--trials"),
        ("tune", ("--held-out", "1.5"), "--held-out"),
        ("tune", ("--layers", "7"), "layer 7 is out of range"),
        ("tune", ("--max-error", "-1"), "--max-error"),
        ("tune", ("--min-hit-ratio", "2"), "--min-hit-ratio"),
    ],
)
def test_commands_on_a_trace(refused, trace, command, options, said):
    assert said in refused(command, trace, *options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--budgets", "0.1,1.5"), "1.5 lies outside (0, 1]"),
        (("--budgets", "0"), "0 lies outside (0, 1]"),
        (("--cache", "lur"), "did you mean 'lru'?"),
    ],
)
def test_simulate(refused, trace, options, said):
    assert said in refused("simulate", trace, *options, out=False)


@pytest.mark.parametrize("command", ["analyze", "simulate", "tune"])
def test_broken_traces_name_the_file(refused, trace, tmp_path, command):
    out = command != "simulate"
    assert "nowhere" in refused(command, tmp_path / "nowhere", out=out)
    assert "manifest.json" in refused(command, tmp_path, out=out)

    broken = tmp_path / "broken"
    shutil.copytree(trace, broken)
    victim = sorted((broken / "kv").rglob("*.parquet"))[0]
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-10])
    assert victim.name in refused(command, broken, out=out)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    victim.write_bytes(bytes(flipped))
    assert victim.name in refused(command, broken, out=out)
    victim.write_bytes(whole)

    manifest = json.loads((broken / "manifest.json").read_text(encoding="utf-8"))
    manifest["format_version"] += 1
    (broken / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert "hint: upgrade kvtune" in refused(command, broken, out=out)


@pytest.mark.parametrize(
    "text", ["a: [1", "a: &x [*x]", "- 1\n- 2", "format: 999", "", "model: !!python/object:os.system {}"]
)
@pytest.mark.parametrize("command", ["show", "validate", "export"])
def test_profiles(refused, tmp_path, command, text):
    path = tmp_path / "profile.yaml"
    path.write_text(text, encoding="utf-8")
    engine = ("--engine", "retroinfer") if command == "export" else ()
    said = refused("profile", command, path, *engine, out=command == "export")
    assert "profile.yaml" in said


def test_a_profile_of_another_model(refused, trace, model, tmp_path, cli):
    study = tmp_path / "study"
    assert cli("tune", trace, "--trials", "1", "--uniform", "--out", study).exit_code == 0
    profile = study / "profile.yaml"
    assert cli("profile", "validate", profile, "--trace", trace).exit_code == 0
    text = profile.read_text(encoding="utf-8")
    other = re.sub(r"fingerprint: '?(\w+)'?", r"fingerprint: '0\1'", text)
    assert other != text
    profile.write_text(other, encoding="utf-8")
    said = refused("profile", "validate", profile, "--trace", trace, out=False)
    assert "fingerprint" in said or "another model" in said
    assert refused("live", model, "--profile", profile, "--context", "100", out=False)
