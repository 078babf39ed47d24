"""The transformers export: a JSON with plain values and a script that compiles and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.models import load_model
from kvtune.profiles.exporters import Export, export_profile


def loaded_script(export: Export, folder: Path) -> dict[str, Any]:
    """The exported script, written, compiled and executed without its main part: its names."""
    for name, text in export.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    path = folder / "run_profile.py"
    namespace: dict[str, Any] = {"__name__": "run_profile", "__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), namespace)
    return namespace


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
def test_script_compiles_whatever_the_model_is_called(variant, model, tmp_path):
    script = loaded_script(export_profile(variant(**{"model.id": model}), "transformers"), tmp_path)
    assert script["MODEL"] == model


@pytest.mark.model
def test_script_runs_the_packaged_model(variant, tmp_path):
    """Below the length that gets an index, decoding under the profile is full attention."""
    loaded = load_model("smollm2-135m", device="cpu")
    profile = variant(
        **{
            "model": {"id": loaded.id, "fingerprint": loaded.fingerprint},
            "geometry": loaded.geometry.to_dict(),
            "context_length": {"min": 1, "max": 8192},
        }
    )
    main = loaded_script(export_profile(profile, "transformers"), tmp_path)["main"]
    prompt = "The capital of France is"
    inputs = loaded.tokenizer(prompt, return_tensors="pt")
    tokens = loaded.model.generate(**inputs, max_new_tokens=8, do_sample=False)
    expected = loaded.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert main(prompt, 8) == expected
    other = variant(**{"model": {"id": loaded.id, "fingerprint": "other"}})
    main = loaded_script(export_profile(other, "transformers"), tmp_path)["main"]
    with pytest.raises(SystemExit, match="the profile is for weights other"):
        main(prompt, 8)
