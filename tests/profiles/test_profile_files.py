"""Profiles on disk: round trips, atomic writes, and every kind of bad file."""

from __future__ import annotations

import os

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import InputError
from kvtune.profiles import load_profile, parse_profile, save_profile, to_yaml
from kvtune.profiles.files import write_text
from kvtune.profiles.strict_yaml import load_yaml

BAD_TEXT = [
    ("a: &x [*x]", "the alias *x is not allowed here (line 1)"),
    ("a: &x {b: 1}\nc:\n  d: *x", "the alias *x is not allowed here (line 3)"),
    ("a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]", "alias"),
    ("[1, 2]", "must hold keys and values, not a list"),
    ("", "must hold keys and values, not nothing"),
    ("just text", "must hold keys and values, not text"),
    ("a: b: c", "(line 1)"),
    ("a: 1\nb: 2\na: 3", "the key 'a' appears twice (line 3)"),
    ("a: {b: 1, b: 2}", "the key 'b' appears twice"),
    ("? [a]\n: b", "a key must be text"),
    ("a: 2020-01-01", "'a' must be plain text or a number, not a date"),
    ("a:\n- b: .nan", "'a.0.b' must be a finite number, not nan"),
    ("a: -.inf", "'a' must be a finite number, not -inf"),
    ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ("a: !!python/name:os.system", "could not determine a constructor"),
    ("a: " + "[" * 800, "nested too deeply"),
    ("\t- a", "(line 1)"),
    ("a: 2020-99-99", "is not valid YAML"),
    ("a: 1\n--- \nb: 2", "single document"),
    ("1.5: a", "the key '1.5' must be text"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXT, ids=[text[:20] for text, _ in BAD_TEXT])
def test_bad_yaml_is_one_sentence(text, message):
    with pytest.raises(InputError) as caught:
        load_yaml(text, "p.yaml")
    assert message in caught.value.message
    assert caught.value.message.startswith("p.yaml")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (2, "has profile format 2; this kvtune reads up to 1"),
        (0, "has profile format 0"),
        ("1", "must be a version number, not 1"),
        (True, "must be a version number, not true/false"),
        (None, "must be a version number, not nothing"),
        (..., "is not a kvtune profile: the key 'kvtune_profile' is missing"),
    ],
)
def test_other_versions_are_refused_before_anything_else(changed, version, message):
    data = changed("kvtune_profile", version)
    data["from_the_future"] = 1
    with pytest.raises(InputError, match=message):
        parse_profile(data)


def test_file_round_trip(profile, tmp_path):
    path = save_profile(profile, tmp_path / "sub" / "p.yaml")
    assert load_profile(path) == profile
    assert path.read_text() == to_yaml(load_profile(path))
    assert yaml.safe_load(path.read_text())["overrides"] == {2: {"retrieval": 0.05}}
    assert os.listdir(path.parent) == ["p.yaml"]


@settings(max_examples=25)
@given(
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.lists(st.integers(0, 9) | st.lists(st.integers(0, 9))),
    fraction=st.floats(0, 1, exclude_min=True),
)
def test_any_parameter_value_survives_the_file(complete, value, fraction):
    data = {**complete, "cache": {"policy": "lru", "fraction": fraction}}
    data["policy"] = {"name": "wave_index", "parameters": {"p": value, "q": {"per_token": fraction}}}
    profile = parse_profile(data)
    again = parse_profile(load_yaml(to_yaml(profile), "p"))
    assert again == profile
    assert again.policy.parameters["p"] == value and type(again.policy.parameters["p"]) is type(value)
    assert to_yaml(again) == to_yaml(profile)


def test_a_profile_may_be_json(profile, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(profile.model_dump_json())
    assert load_profile(path) == profile


def test_existing_files_are_kept_unless_told_otherwise(profile, variant, tmp_path):
    path = save_profile(profile, tmp_path / "p.yaml")
    other = variant(**{"provenance.seed": 7})
    with pytest.raises(InputError, match="exists"):
        save_profile(other, path)
    assert load_profile(path) == profile
    save_profile(other, path, overwrite=True)
    assert load_profile(path) == other


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "p.yaml"
    path.write_text("old")

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["p.yaml"]


def test_files_that_are_no_profiles(tmp_path):
    with pytest.raises(InputError, match="there is no profile"):
        load_profile(tmp_path / "missing.yaml")
    with pytest.raises(InputError, match="is a folder"):
        load_profile(tmp_path)
    path = tmp_path / "p.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load_profile(path)
