"""``kvtune profile``: what it prints, writes and refuses."""

from __future__ import annotations

import json

import pytest

from kvtune.commands.app import run
from kvtune.profiles import save_profile
from kvtune.traces import TraceWriter


@pytest.fixture
def kvtune(capsys):
    """Run a command line: (exit code, stdout, stderr)."""

    def call(*words):
        code = run(["profile", *map(str, words)])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def path(profile, tmp_path):
    return save_profile(profile, tmp_path / "p.yaml")


def write_trace(profile, folder, fingerprint):
    header = {
        "model": "tiny",
        "fingerprint": fingerprint,
        "geometry": profile.geometry.to_model().to_dict(),
        "dtype": "bfloat16",
        "layers": [0],
        "kv_heads": [0],
        "values": True,
    }
    TraceWriter(folder, header).finish()
    return folder


def test_show_prints_settings_evidence_and_origin(kvtune, path):
    code, out, err = kvtune("show", path)
    assert (code, err) == (0, "")
    for text in ("wave_index", "0.018", "layer 2", "0, 1", "held-out samples the choice wins", "seed 0"):
        assert text in out
    assert f"next: kvtune profile export {path} --engine retroinfer" in out


def test_show_resolves_functions_at_the_length_asked_for(kvtune, variant, tmp_path):
    profile = variant(**{"policy.parameters.local": {"per_token": 0.01}})
    path = save_profile(profile, tmp_path / "p.yaml")
    code, out, err = kvtune("show", path, "--context", 10_000, "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["resolved"]["parameters"]["local"] == 100
    assert document["content"]["policy"]["parameters"]["local"]["per_token"] == 0.01
    _, _, err = kvtune("show", path, "--context", 1000, "--json")
    assert "was not tuned for 1000 tokens" in err


def test_show_says_where_evidence_is_missing(kvtune, variant, tmp_path):
    profile = variant(held_out=None, predicted=None, policy={"name": "streaming"}, overrides={})
    _, out, _ = kvtune("show", save_profile(profile, tmp_path / "p.yaml"))
    assert "Not checked on held-out samples." in out
    assert "--engine transformers" in out


def test_validate_alone_and_against_a_trace(kvtune, path, profile, tmp_path):
    assert kvtune("validate", path)[0] == 0
    trace = write_trace(profile, tmp_path / "same.trace", profile.model.fingerprint)
    code, out, _ = kvtune("validate", path, "--trace", trace, "--json")
    assert code == 0
    assert json.loads(out)["valid"] is True


def test_validate_names_both_models_where_fingerprints_differ(kvtune, path, profile, tmp_path):
    trace = write_trace(profile, tmp_path / "other.trace", "beef")
    code, out, err = kvtune("validate", path, "--trace", trace)
    assert (code, out) == (2, "")
    for text in (profile.model.id, profile.model.fingerprint, "tiny", "beef"):
        assert text in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kvtune_profile: 1\nmodel: &m [*m]\n", "alias"),
        ("kvtune_profile: 99\n", "reads up to 1"),
        ("a: 1\n", "is not a kvtune profile"),
        ("[", "is not valid YAML"),
    ],
)
def test_bad_profiles_are_one_sentence_and_exit_2(kvtune, tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    for words in (("show", path), ("validate", path), ("diff", path, path)):
        code, out, err = kvtune(*words)
        assert (code, out) == (2, "")
        assert message in err and "Traceback" not in err
    out_folder = tmp_path / "out"
    assert kvtune("export", path, "--engine", "retroinfer", "--out", out_folder)[0] == 2
    assert not out_folder.exists()


def test_validate_asks_the_policy(kvtune, variant, tmp_path):
    path = save_profile(variant(**{"policy.parameters.retreival": 0.1}), tmp_path / "p.yaml")
    code, _, err = kvtune("validate", path)
    assert code == 2
    assert "retreival" in err and "did you mean 'retrieval'?" in err
    path = save_profile(variant(policy={"name": "wave_indx"}), tmp_path / "q.yaml")
    assert "did you mean 'wave_index'?" in kvtune("validate", path)[2]


def test_diff_lists_changes(kvtune, path, variant, tmp_path):
    other = save_profile(variant(**{"policy.parameters.retrieval": 0.036}), tmp_path / "q.yaml")
    code, out, _ = kvtune("diff", path, other, "--json")
    assert code == 0
    assert json.loads(out)["changes"] == [
        {"key": "policy.parameters.retrieval", "first": 0.018, "second": 0.036}
    ]
    assert "2×" in kvtune("diff", path, other)[1]
    assert "equal" in kvtune("diff", path, path)[1]


def test_export_json_keys(kvtune, path, tmp_path):
    words = ("export", path, "--engine", "retroinfer", "--engine-version", "v1", "--out", tmp_path / "out")
    code, out, _ = kvtune(*words, "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["engine"], document["engine_version"]) == ("retroinfer", "v1")
    assert {"files", "not_expressible"} <= set(document)
    assert all((tmp_path / "out") in (tmp_path / name).parents for name in document["files"])
    assert [item["setting"] for item in document["not_expressible"]] == [
        "overrides.2.retrieval",
        "dense_layers",
    ]


def test_export_refuses_existing_output(kvtune, path, tmp_path):
    words = ("export", path, "--engine", "transformers", "--out", tmp_path / "out")
    assert kvtune(*words)[0] == 0
    code, out, err = kvtune(*words)
    assert (code, out) == (2, "")
    assert "exists" in err and "--overwrite" in err
    assert kvtune(*words, "--overwrite")[0] == 0
    file = tmp_path / "file"
    file.write_text("")
    assert kvtune("export", path, "--engine", "transformers", "--out", file)[0] == 2


def test_export_says_what_is_lost_and_what_to_do_next(kvtune, path):
    code, out, _ = kvtune("export", path, "--engine", "retroinfer")
    assert code == 0
    assert "one setting serves all layers" in out
    assert "next: copy" in out
    assert (path.parent / "p-retroinfer-v1" / "kvtune-export.json").exists()


def test_export_quiet_prints_the_folder_only(kvtune, path, tmp_path):
    code, out, err = kvtune("export", path, "--engine", "retroinfer", "-q", "--out", tmp_path / "o")
    assert (code, out, err) == (0, f"{tmp_path / 'o'}\n", "")


def test_unknown_names_get_suggestions(kvtune, path):
    code, _, err = kvtune("export", path, "--engine", "retroinfr")
    assert code == 2 and "did you mean 'retroinfer'?" in err
    code, _, err = kvtune("shwo", path)
    assert code == 2 and "show" in err
    assert kvtune("export", path, "--engine", "retroinfer", "--context", 0)[0] == 2
