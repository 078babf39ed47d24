"""vLLM, SGLang, TensorRT-LLM and LMCache: only keys and values they have, everything else accounted for."""

from __future__ import annotations

import json

import pytest
import yaml

from kvtune.profiles.exporters import engines_for, export_profile

FILES = {
    "vllm": "vllm.yaml",
    "sglang": "sglang.yaml",
    "tensorrt_llm": "trtllm.yaml",
    "lmcache": "lmcache.yaml",
}
REMOVED = ("calculate-kv-scales", "swap-space", "double-sparsity", "ds-")
MODES = {
    # engine: key of the KV dtype, name of each precision it has
    "vllm": ("kv-cache-dtype", {"fp8": "fp8", "int8": "int8_per_token_head", "int4": "int4_per_token_head"}),
    "sglang": ("kv-cache-dtype", {"fp8": "fp8_e4m3"}),
    "tensorrt_llm": ("dtype", {"fp8": "fp8"}),
}


def document(profile, engine, context=None):
    result = export_profile(profile, engine, context_length=context)
    text = result.files[FILES[engine]]
    lost = {item.setting: item.reason for item in result.not_expressible}
    return yaml.safe_load(text), lost, text


@pytest.fixture(params=FILES)
def engine(request):
    return request.param


def test_a_retrieval_profile_loses_its_retrieval_and_says_so(profile, engine):
    _, lost, text = document(profile, engine)
    for key in profile.settings():
        if key.startswith(("policy", "overrides")):
            assert "sparse decode" in lost[key]
    assert {"dense_layers", "cache.policy", "cache.fraction"} <= set(lost)
    assert not any(flag in text for flag in REMOVED)


def test_full_attention_is_expressed_in_full(variant, engine):
    profile = variant(policy={"name": "full"}, overrides={}, cache=None, dense_layers=[])
    _, lost, _ = document(profile, engine)
    assert set(lost) == ({"model.id"} if engine == "lmcache" else set())
    assert engine in engines_for("full") and engine not in engines_for("wave_index")


@pytest.mark.parametrize("precision", ["native", "fp8", "int8", "int4", "kivi2"])
@pytest.mark.parametrize("served", MODES)
def test_kv_precision_by_the_engines_name_or_not_at_all(variant, served, precision):
    key, names = MODES[served]
    profile = variant(kv_precision={"keys": precision, "values": precision})
    config, lost, _ = document(profile, served)
    config = config.get("kv_cache_config", config)
    assert config[key] == names.get(precision, "auto")
    assert ("kv_precision.keys" in lost) == (precision != "native" and precision not in names)
    mixed, lost, _ = document(variant(kv_precision={"keys": "fp8", "values": "native"}), served)
    assert mixed.get("kv_cache_config", mixed)[key] == "auto"
    assert {"kv_precision.keys", "kv_precision.values"} <= set(lost)


def test_integer_caches_come_with_the_backend_that_has_them(variant):
    config, _, _ = document(variant(kv_precision={"keys": "int8", "values": "int8"}), "vllm")
    assert config["attention-backend"] == "TRITON_ATTN" and config["block-size"] % 16 == 0
    config, _, _ = document(variant(), "vllm")
    assert "attention-backend" not in config


@pytest.mark.parametrize(
    ("served", "key"),
    [("vllm", "max-model-len"), ("sglang", "context-length"), ("tensorrt_llm", "max_seq_len")],
)
def test_length_is_context_and_answer_within_the_models_positions(variant, served, key):
    profile = variant(context_length={"min": 8192, "max": 65536})
    assert document(profile, served)[0][key] == 65536 + 64
    assert document(variant(), served)[0][key] == 131072
    config, lost, _ = document(profile, served, context=16384)
    assert config[key] == 16384 + 64
    assert "16448 tokens" in lost["context_length.max"]


def test_rope_override_reaches_vllm_with_its_length(variant):
    profile = variant(**{"model.rope": {"override": "yarn:4"}})
    config, lost, _ = document(profile, "vllm")
    assert config["hf-overrides"] == {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
        "max_position_embeddings": 131072,
    }
    assert "model.rope.override" not in lost
    for other in ("sglang", "tensorrt_llm", "lmcache"):
        assert "model.rope.override" in document(profile, other)[1]
    assert "hf-overrides" not in document(variant(), "vllm")[0]


def test_prefix_reuse_follows_the_workload(variant):
    once = variant(workload={"task": "niah_single", "samples": 4})
    for profile, shared in ((variant(), True), (once, False), (variant(workload=None), False)):
        assert document(profile, "vllm")[0].get("enable-prefix-caching", False) == shared
        config = document(profile, "tensorrt_llm")[0]["kv_cache_config"]
        assert config["enable_block_reuse"] == shared


def test_lmcache_tier_holds_one_sequence(variant):
    geometry = {"n_layers": 32, "windows": [None] * 32, "softcaps": [None] * 32, "sinks": [False] * 32}
    profile = variant(
        **{f"geometry.{key}": value for key, value in geometry.items()},
        **{"geometry.n_kv_heads": 8, "geometry.head_dim": 128, "geometry.value_dim": 128},
    )
    config, _, _ = document(profile, "lmcache")
    assert config["max_local_cpu_size"] == 16  # 131,072 tokens of 128 KiB
    assert document(profile, "lmcache", context=65536)[0]["max_local_cpu_size"] == 9
    connector = export_profile(profile, "lmcache").files["kv-transfer-config.json"]
    assert json.loads(connector)["kv_connector"] == "LMCacheConnectorV1"


def test_first_line_names_engine_and_version(profile, engine):
    result = export_profile(profile, engine)
    first = result.files[FILES[engine]].splitlines()[0]
    assert result.engine_version in first and first.startswith("# ")
