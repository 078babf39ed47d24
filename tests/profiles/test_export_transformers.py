"""The transformers export: a JSON with plain values and a script that compiles and runs."""

from __future__ import annotations

import json
import sys
import types

import pytest

from kvtune.profiles.exporters import export_profile


def test_json_holds_plain_values_at_one_length(variant):
    profile = variant(
        **{
            "policy.parameters": {"retrieval": 0.02, "local": {"per_token": 0.001, "minimum": 64}},
            "overrides": {3: {"sink": {"per_token": 0.0005}}},
        }
    )
    document = json.loads(
        export_profile(profile, "transformers", context_length=100_000).files["profile.json"]
    )
    assert document == {
        "kvtune_runtime": 1,
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "fingerprint": "sha256:0123",
        "context_length": 100_000,
        "policy": "wave_index",
        "parameters": {"retrieval": 0.02, "local": 100},
        "overrides": {"3": {"sink": 50}},
        "dense_layers": [0, 1],
        "cache": {"policy": "wave", "fraction": 0.05},
    }


def test_everything_but_another_precision_is_expressed(variant):
    assert export_profile(variant(), "transformers").not_expressible == ()
    lost = export_profile(variant(**{"kv_precision.keys": "int8"}), "transformers").not_expressible
    assert [item.setting for item in lost] == ["kv_precision.keys"]


@pytest.mark.parametrize("model", ["org/model", 'a"""b', "x'; import os  # {model}", "日本"])
def test_script_compiles_whatever_the_model_is_called(variant, model):
    script = export_profile(variant(**{"model.id": model}), "transformers").files["run_profile.py"]
    code = compile(script, "run_profile.py", "exec")
    namespace = {"__name__": "snippet", "__file__": "run_profile.py"}
    runtime = types.ModuleType("kvtune.runtime")
    runtime.apply_profile = lambda model, path: None
    loaders = types.ModuleType("transformers")
    loaders.AutoModelForCausalLM = loaders.AutoTokenizer = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "kvtune.runtime", runtime)
        patch.setitem(sys.modules, "transformers", loaders)
        exec(code, namespace)
    assert namespace["MODEL"] == model
