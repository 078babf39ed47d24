"""What the schema accepts, refuses and works out."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.errors import InputError
from kvtune.geometry import ModelGeometry
from kvtune.profiles import PerToken, parse_profile
from kvtune.profiles.subject import Geometry, Model

REFUSED = [
    # key, value (... removes the key), what the message says
    ("cache.fraction", 1.5, "'cache.fraction' must be at most 1, not 1.5"),
    ("cache.fraction", 0, "'cache.fraction' must be above 0, not 0"),
    ("cache.fraction", "0.05", "'cache.fraction' must be a number, not '0.05'"),
    ("cache.policy", "belady", "'cache.policy' must be 'wave' or 'lru', not 'belady'"),
    ("cache", [0.05], "'cache' must be keys and values, not a list"),
    ("policy", ..., "the key 'policy' is missing"),
    ("policy.name", 3, "'policy.name' must be text, not 3"),
    ("policy.name", "", "'policy.name' must not be empty"),
    (
        "policy.parameters.sink",
        {"per_token": -1},
        "'policy.parameters.sink.per_token' must be above 0, not -1",
    ),
    (
        "policy.parameters.sink",
        {"per_token": 1, "minimum": 5, "maximum": 4},
        "maximum 4 lies below minimum 5",
    ),
    ("overrides", {9: {"sink": 1}}, "overrides names layer 9, but the model has layers 0 to 3"),
    ("overrides", {0: {"sink": 1}}, "layer 0 is both in dense_layers and in overrides"),
    ("overrides", {"first": {}}, "'overrides.first' must be a whole number, not 'first'"),
    ("dense_layers", [0, 7], "dense_layers names layer 7, but the model has layers 0 to 3"),
    ("dense_layers", [1, 0], "dense_layers: layers must be ascending, each once"),
    ("dense_layers", [1, 1], "dense_layers: layers must be ascending, each once"),
    ("dense_layers", [-1], "'dense_layers.0' must be at least 0, not -1"),
    ("dense_layers", 0, "'dense_layers' must be a list, not 0"),
    ("context_length", {"min": 9, "max": 8}, "context_length: max 8 lies below min 9"),
    ("context_length.min", 0, "'context_length.min' must be at least 1, not 0"),
    ("context_length.min", True, "'context_length.min' must be a whole number, not true"),
    ("context_length.max", 8192.5, "'context_length.max' must be a whole number, not 8192.5"),
    ("geometry.windows", [None], "geometry: windows has 1 entries for 4 layers"),
    ("geometry.n_kv_heads", 3, "geometry: 8 heads cannot share 3 kv heads evenly"),
    ("geometry.dtype", "int8", "'geometry.dtype' must be"),
    ("model.id", "a\nb", "model.id: must be one line"),
    ("predicted.output_error.mean.low", 9.0, "predicted.output_error.mean: 0.05 lies outside its interval"),
    ("predicted.hit_ratio.high", ..., "predicted.hit_ratio: low and high must be given together"),
    ("held_out.winner", "me", "'held_out.winner' must be 'chosen', 'default' or 'tie', not 'me'"),
    ("kv_precision.keys", "int3", "'kv_precision.keys' must be"),
    ("break_even", [{"context_length": 1}], "the key 'break_even.0.batch_size' is missing"),
    ("provenance", None, "'provenance' must be keys and values, not nothing"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED, ids=lambda item: str(item)[:40])
def test_refused_in_one_sentence_that_names_the_key(changed, key, value, message):
    with pytest.raises(InputError) as caught:
        parse_profile(changed(key, value), "p.yaml")
    assert caught.value.message.startswith("p.yaml: ")
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("cach", "did you mean 'cache'?"),
        ("cache.fractoin", "did you mean 'fraction'?"),
        ("held_out.chosen.output_error.men", "did you mean 'mean'?"),
        ("policy.zzz", "known: name, parameters"),
    ],
)
def test_unknown_keys_get_a_suggestion(changed, key, hint):
    with pytest.raises(InputError, match=f"unknown key '{key}'") as caught:
        parse_profile(changed(key, 1), "p.yaml")
    assert caught.value.hint == hint


def test_optional_parts_may_be_absent(data):
    for key in ("workload", "hardware", "predicted", "held_out", "cache", "overrides", "dense_layers"):
        del data[key]
    profile = parse_profile(data)
    assert profile.cache is None and profile.held_out is None and profile.live is None
    assert profile.kv_precision.keys == "native"


def test_live_results_and_break_even_are_part_of_the_schema(data):
    ratios = {"request": 0.5, "page": 0.6, "token": 0.7}
    data["live"] = {
        "context_length": 8192,
        "kl": {"mean": 0.01, "p95": 0.1},
        "delta_nll": {"mean": 0.002, "low": -0.001, "high": 0.005},
        "top1": 0.97,
        "hit_ratio": ratios,
        "replayed_hit_ratio": ratios,
        "tokens_per_second": 20.0,
        "full_tokens_per_second": 25,
    }
    data["break_even"] = [{"context_length": 65536, "batch_size": 8, "output_length": 256, "speedup": 1.4}]
    profile = parse_profile(data)
    assert profile.live is not None and profile.live.hit_ratio == profile.live.replayed_hit_ratio
    assert profile.break_even is not None and profile.break_even[0].speedup == 1.4


def test_geometry_mirrors_the_instruments_dataclass(profile):
    assert set(Geometry.model_fields) == {field.name for field in dataclasses.fields(ModelGeometry)}
    geometry = profile.geometry.to_model()
    assert geometry.windows == (None,) * 4
    assert parse_profile({**profile.model_dump(), "geometry": geometry.to_dict()}) == profile


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("smollm2-135m", "smollm2-135m"),
        ("./models/mine/", "mine"),
        ("C:\\models\\mine", "mine"),
        ("a/..", "model"),
        ("/", "model"),
    ],
)
def test_basename_never_leaves_its_folder(model, name):
    assert Model(id=model, fingerprint="f").basename == name


def test_resolve_merges_base_and_layer_parameters(variant):
    profile = variant(
        **{
            "policy.parameters": {"retrieval": 0.02, "local": {"per_token": 0.01, "minimum": 64}},
            "overrides": {3: {"retrieval": 0.1, "sink": {"per_token": 0.001}}},
        }
    )
    resolved = profile.resolve(16000)
    assert resolved.parameters == {"retrieval": 0.02, "local": 160}
    assert resolved.layer(0) == ("full", {})
    assert resolved.layer(2) == ("wave_index", {"retrieval": 0.02, "local": 160})
    assert resolved.layer(3) == ("wave_index", {"retrieval": 0.1, "local": 160, "sink": 16})
    assert not resolved.extrapolated
    assert profile.resolve(4096).extrapolated and profile.resolve(4096).parameters["local"] == 64
    assert profile.resolve(131073).extrapolated
    with pytest.raises(ValueError, match="at least 1"):
        profile.resolve(0)


@given(
    per_token=st.floats(1e-6, 2),
    context=st.integers(1, 2_000_000),
    multiple=st.integers(1, 512),
    low=st.integers(0, 5000),
    extra=st.none() | st.integers(0, 100_000),
)
def test_counts_scale_with_the_context_within_bounds(per_token, context, multiple, low, extra):
    high = None if extra is None else low + extra
    count = PerToken(per_token=per_token, minimum=low, maximum=high, multiple=multiple).at(context)
    exact = Fraction(per_token) * context
    assert count >= low and (high is None or count <= high)
    if count not in (low, high):
        assert count % multiple == 0
        assert abs(count - exact) <= Fraction(multiple, 2) + Fraction(1, 1000)


def test_settings_are_what_an_engine_can_be_told(profile):
    settings = profile.settings()
    assert settings["policy.parameters.retrieval"] == 0.018
    assert settings["overrides.2.retrieval"] == 0.05
    assert settings["dense_layers"] == [0, 1]
    assert not any(key.startswith(("geometry", "predicted", "provenance")) for key in settings)
    assert "model.fingerprint" not in settings
