"""Every exporter in the registry, held to the same rules."""

from __future__ import annotations

import ast
import json
import os

import pytest
import yaml

from kvtune.errors import InputError
from kvtune.profiles.exporters import MANIFEST, export_profile, registry, write_export
from kvtune.profiles.exporters.base import Exporter

ROWS = registry.EXPORTERS
POLICIES = {
    "full": {},
    "streaming": {"sink": 4, "recent": {"per_token": 0.125, "minimum": 64, "multiple": 8}},
    "wave_index": {
        "retrieval": 0.018,
        "estimation": 0.232,
        "estimate": "budget",
        "tokens_per_centroid": 16,
        "segment": 8192,
        "sink": 4,
        "local": 64,
        "buffer_clusters": 32,
    },
}
CHANGES = [
    # one setting after the other, changed from what the complete profile says
    ("policy.parameters.retrieval", 0.03),
    ("policy.parameters.estimation", 0.5),
    ("policy.parameters.estimate", "all"),
    ("policy.parameters.tokens_per_centroid", 8),
    ("policy.parameters.segment", 4096),
    ("policy.parameters.sink", 16),
    ("policy.parameters.local", 128),
    ("policy.parameters.buffer_clusters", 2000),
    ("overrides", {2: {"retrieval": 0.1}}),
    ("overrides", {3: {"retrieval": 0.05}}),
    ("dense_layers", [0]),
    ("cache.policy", "lru"),
    ("cache.fraction", 0.1),
    ("cache.fraction", 1.0),
    ("kv_precision.keys", "fp8"),
    ("kv_precision.values", "int4"),
    ("model.id", "someone/Other-Llama"),
    ("model.rope", {"override": "yarn:4"}),
    ("model.rope", {"override": "dynamic:4", "length": 9000}),
    ("context_length.min", 16384),
    ("context_length.max", 65536),
]


def export(row: Exporter, profile, context_length=None):
    return export_profile(profile, row.engine, row.engine_version, context_length)


@pytest.fixture(params=POLICIES)
def any_profile(request, variant):
    """The complete profile with each policy; per-layer overrides are wave_index's."""
    changes = {"policy": {"name": request.param, "parameters": POLICIES[request.param]}}
    if request.param != "wave_index":
        changes["overrides"] = {}
    return variant(**changes)


@pytest.fixture(params=ROWS, ids=lambda row: f"{row.engine}-{row.engine_version}")
def row(request) -> Exporter:
    return request.param


@pytest.fixture
def runnable(row, any_profile):
    if row.required and not row.runs(any_profile.policy.name):
        pytest.skip("refused, see test_a_policy_the_engine_cannot_run_is_refused")
    return any_profile


def test_same_profile_same_bytes(row, runnable, tmp_path):
    written = []
    for name in ("a", "b"):
        paths = write_export(runnable, export(row, runnable), tmp_path / name)
        written.append([(str(path.relative_to(tmp_path / name)), path.read_bytes()) for path in paths])
    assert written[0] == written[1]


def test_every_file_parses_and_ends_with_a_newline(row, runnable):
    parsers = {".json": json.loads, ".yaml": yaml.safe_load, ".py": ast.parse, ".args": str.split}
    files = export(row, runnable).files
    assert files
    for name, text in files.items():
        assert text.endswith("\n") and not text.endswith("\n\n")
        assert parsers[os.path.splitext(name)[1]](text)


def test_every_setting_is_expressed_or_listed_never_both(row, runnable):
    result = export(row, runnable)
    listed = [item.setting for item in result.not_expressible]
    assert sorted([*result.expressed, *listed]) == sorted(runnable.settings())
    for item in result.not_expressible:
        assert item.reason
        assert item.value == runnable.settings()[item.setting]


@pytest.mark.parametrize(("key", "value"), CHANGES, ids=[f"{key}={value}" for key, value in CHANGES])
def test_no_setting_is_claimed_that_the_files_do_not_carry(row, variant, key, value):
    """A changed setting changes the files, or the export says that they do not carry it."""
    base = {
        "policy": {"name": "wave_index", "parameters": dict(POLICIES["wave_index"])},
        "context_length": {"min": 8192, "max": 131072},
    }
    before, after = variant(**base), variant(**base, **{key: value})
    result = export(row, after, 65536)
    listed = {item.setting for item in result.not_expressible}
    settings = {name for name in after.settings() if after.settings()[name] != before.settings().get(name)}
    assert settings
    unlisted = settings - listed
    covers_all_lengths = key.startswith("context_length")
    if unlisted and not covers_all_lengths:
        assert export(row, before, 65536).files != result.files


def test_engine_version_and_identity_are_in_the_manifest(row, runnable, tmp_path):
    result = export(row, runnable)
    paths = write_export(runnable, result, tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert (manifest["engine"], manifest["engine_version"]) == (row.engine, row.engine_version)
    assert manifest["fingerprint"] == runnable.model.fingerprint
    assert manifest["context_length"] == runnable.context_length.max
    assert [tmp_path / name for name in manifest["files"]] + [tmp_path / MANIFEST] == paths
    assert [item["setting"] for item in manifest["not_expressible"]] == [
        item.setting for item in result.not_expressible
    ]


def test_existing_output_is_kept_unless_told_otherwise(row, runnable, tmp_path):
    result = export(row, runnable)
    last = tmp_path / list(result.files)[-1]
    last.parent.mkdir(parents=True, exist_ok=True)
    last.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        write_export(runnable, result, tmp_path)
    assert last.read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [last]
    write_export(runnable, result, tmp_path, overwrite=True)
    assert last.read_text() == result.files[list(result.files)[-1]]
    litter = [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]
    assert litter == []


def test_a_full_disk_leaves_no_part_of_a_file(row, runnable, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_export(runnable, export(row, runnable), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_policy_the_engine_cannot_run_is_refused(row, any_profile):
    if not row.required or row.runs(any_profile.policy.name):
        assert export(row, any_profile).files
        return
    with pytest.raises(InputError, match=f"cannot run the policy '{any_profile.policy.name}'"):
        export(row, any_profile)


def test_functions_of_the_context_are_evaluated_and_their_loss_is_named(row, variant):
    parameters = {"local": {"per_token": 0.001, "minimum": 64, "multiple": 8}}
    scaled = {"policy": {"name": "wave_index", "parameters": parameters}, "overrides": {}}
    several = export(row, variant(**scaled))
    assert "policy.parameters.local" in [item.setting for item in several.not_expressible]
    one = variant(**scaled, context_length={"min": 65536, "max": 65536})
    fixed = variant(
        policy={"name": "wave_index", "parameters": {"local": 64}},
        overrides={},
        context_length={"min": 65536, "max": 65536},
    )
    if "policy.parameters.local" in export(row, one).expressed:
        assert export(row, one).files == export(row, fixed).files


def test_bad_parameters_are_refused_before_anything_is_written(row, variant):
    with pytest.raises(InputError, match="unknown parameter of policy 'wave_index' 'sinks'"):
        export(row, variant(**{"policy.parameters.sinks": 4}))
    with pytest.raises(InputError, match="retrieval must lie in"):
        export(row, variant(overrides={3: {"retrieval": 7.0}}))


@pytest.mark.parametrize(
    ("engine", "version", "message", "hint"),
    [
        ("retroinfr", None, "unknown engine 'retroinfr'", "did you mean 'retroinfer'?"),
        ("retroinfer", "v3", "unknown version of retroinfer 'v3'", "did you mean"),
        ("transformers", "4.0", "unknown version of transformers '4.0'", "5.24.0"),
    ],
)
def test_unknown_engines_and_versions_get_a_suggestion(profile, engine, version, message, hint):
    with pytest.raises(InputError) as caught:
        export_profile(profile, engine, version)
    assert caught.value.message == message
    assert hint in caught.value.hint


def test_the_newest_version_is_the_default(profile):
    for engine, versions in registry.engines().items():
        assert export_profile(profile, engine).engine_version == versions[-1]
