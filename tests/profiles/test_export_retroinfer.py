"""RetroInfer's files: what the engine would make of them, computed here from its published rules."""

from __future__ import annotations

import argparse
import json
import math

import pytest

from kvtune.profiles.exporters import export_profile

GOLDEN = [
    # context, segments, n_centroids, nprobe, es, cache clusters at ratio 0 / 0.05, buffer pages
    (4096, 1, 256, 5, 59, 15, 13, 300),
    (8192, 1, 512, 9, 119, 27, 26, 72),
    (30000, 4, 1872, 34, 434, 102, 94, 272),
    (120000, 15, 7440, 134, 1726, 402, 372, 1072),
    (131072, 16, 8192, 147, 1901, 441, 410, 1176),
    (1024000, 125, 64000, 1152, 14848, 3456, 3200, 9216),
]
STEM = "config/Llama-3.1-8B-Instruct"
DEFAULTS = {"name": "wave_index", "parameters": {}}


def exported(profile, version, context=None):
    result = export_profile(profile, "retroinfer", version, context)
    config = json.loads(result.files[f"{STEM}.json"])["RetroInfer"]
    return config, result.files[f"{STEM}.args"].split(), {item.setting for item in result.not_expressible}


def parsed(words):
    """The arguments through a parser with v1's option names, types and defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--attn_type", choices=["Full_Flash_Attn", "RetroInfer"])
    parser.add_argument("--model_name")
    parser.add_argument("--dtype", choices=["fp16", "bf16"])
    parser.add_argument("--retrieval_budget", type=float, default=0.018)
    parser.add_argument("--estimation_budget", type=float, default=0.232)
    parser.add_argument("--cache_ratio", type=float, default=0.0)
    parser.add_argument("--use_cuda_graph", action="store_true")
    parser.add_argument("--gpu_only", action="store_true")
    return parser.parse_args(words)


def overwritten(config, arguments, context):
    """What is left of the JSON after v1's rules for one input length, said again in small steps."""
    segments = max(round(context / 8192), 1)
    factor = math.lcm(8, segments)
    wanted = max(round(context / 16), factor)
    multiples = range(factor, wanted + 2 * factor, factor)
    return {
        **config,
        "n_centroids": min(multiples, key=lambda multiple: (abs(multiple - wanted), multiple)),
        "n_segment": segments,
        "pages_per_cluster": 2,
        "retrieval_budget": arguments.retrieval_budget,
        "estimation_budget": arguments.estimation_budget,
        "cache_ratio": arguments.cache_ratio,
        "buffer_cluster_num": 150 if context <= 4096 else config["buffer_cluster_num"],
        "use_cuda_graph": arguments.use_cuda_graph,
        "gpu_only": arguments.gpu_only,
    }


def engine_counts(config):
    """nprobe, es, cache clusters and buffer pages as v1's cache derives them from its settings."""
    n = config["n_centroids"]
    nprobe = min(max(round(n * config["retrieval_budget"]), 1), n)
    es = min(round(n * config["estimation_budget"]), n - nprobe)
    ratio = config["cache_ratio"]
    cache = round(n * ratio) if ratio > 0 else 3 * nprobe
    return nprobe, es, cache, max(config["buffer_cluster_num"], 4 * nprobe) * config["pages_per_cluster"]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: str(row[0]))
@pytest.mark.parametrize("ratio", [0, 0.05])
def test_v1_golden_table(variant, row, ratio):
    context, segments, centroids, nprobe, es, cache_default, cache_5, buffer_pages = row
    cache = {"policy": "wave", "fraction": ratio} if ratio else None
    profile = variant(
        policy=DEFAULTS, overrides={}, cache=cache, context_length={"min": context, "max": context}
    )
    config, words, _ = exported(profile, "v1")
    assert (config["n_segment"], config["n_centroids"]) == (segments, centroids)
    expected = (nprobe, es, cache_5 if ratio else cache_default, buffer_pages)
    assert engine_counts(config) == expected
    after = overwritten(config, parsed(words), context)
    assert after == config
    assert engine_counts(after) == expected


def test_v1_names_every_key_of_the_shipped_files(profile):
    config, words, lost = exported(profile, "v1")
    assert list(config) == [
        "static_pattern_start",
        "static_pattern_end",
        "core",
        "n_centroids",
        "n_segment",
        "pages_per_cluster",
        "retrieval_budget",
        "estimation_budget",
        "cache_ratio",
        "buffer_cluster_num",
        "use_cuda_graph",
        "gpu_only",
    ]
    assert (config["static_pattern_start"], config["static_pattern_end"], config["core"]) == (4, 64, 22)
    arguments = parsed(words)
    assert arguments.model_name == "meta-llama/Llama-3.1-8B-Instruct"
    assert (arguments.dtype, arguments.cache_ratio) == ("bf16", 0.05)
    assert lost == {"overrides.2.retrieval", "dense_layers"}


def test_v1_keeps_in_the_json_what_generate_config_resets_and_says_so(variant):
    profile = variant(**{"policy.parameters.tokens_per_centroid": 8, "policy.parameters.segment": 4096})
    config, words, lost = exported(profile, "v1", 32768)
    assert (config["n_centroids"], config["n_segment"], config["pages_per_cluster"]) == (4096, 8, 1)
    assert overwritten(config, parsed(words), 32768)["n_centroids"] == 2048
    assert {"policy.parameters.tokens_per_centroid", "policy.parameters.segment"} <= lost
    assert {"context_length.min", "context_length.max"} <= lost
    assert "cache.fraction" not in lost


@pytest.mark.parametrize("tokens_per_centroid", [4, 8, 12, 16, 24, 32])
def test_cache_holds_its_fraction_of_the_context_in_pages(variant, tokens_per_centroid):
    context = 131072
    profile = variant(**{"policy.parameters.tokens_per_centroid": tokens_per_centroid})
    config, words, _ = exported(profile, "v1", context)
    slots = engine_counts(config)[2] * config["pages_per_cluster"]
    assert slots * 8 / context == pytest.approx(0.05, rel=0.01)
    after = overwritten(config, parsed(words), context)
    assert engine_counts(after)[2] * 2 * 8 / context == pytest.approx(0.05, rel=0.01)
    config, _, _ = exported(profile, "v0", context)
    pages = math.ceil(((context - 68) // config["n_centroids"]) / 8)
    assert config["cache_cluster_num"] * pages * 8 / context == pytest.approx(0.05, rel=0.01)


def test_everything_cached_is_the_gpu_only_mode(variant):
    config, words, lost = exported(variant(**{"cache.fraction": 1.0}), "v1")
    assert config["gpu_only"] is True and parsed(words).gpu_only
    assert not lost & {"cache.fraction", "cache.policy"}


def test_estimating_all_clusters_is_a_budget_of_all(variant):
    config, _, lost = exported(variant(**{"policy.parameters.estimate": "all"}), "v1")
    nprobe, es, *_ = engine_counts(config)
    assert nprobe + es == config["n_centroids"]
    assert "policy.parameters.estimate" not in lost
    config, words, _ = exported(variant(**{"policy.parameters.estimate": "all"}), "v0")
    ratio = float(words[words.index("--estimate_ratio") + 1])
    n = config["n_centroids"]
    assert n - 1 <= int(n * ratio) + max(1, int(n * 0.018)) <= n
    assert config["max_compute_cluster_num"] <= n


def test_full_attention_is_the_engines_own(variant):
    profile = variant(policy={"name": "full", "parameters": {}}, overrides={})
    for version in ("v0", "v1"):
        config, words, lost = exported(profile, version)
        assert words[:2] == ["--attn_type", "Full_Flash_Attn"]
        assert not any("budget" in word for word in words)
        assert config["n_centroids"] == 8192
        assert lost == {"cache.policy", "cache.fraction"}


def test_v0_keys_and_counts(variant):
    """The shipped v0 files are for 128K: 8192 clusters, 16 segments."""
    profile = variant(policy=DEFAULTS, overrides={}, cache=None, dense_layers=[])
    config, words, lost = exported(profile, "v0")
    assert config == {
        "static_pattern_start": 4,
        "static_pattern_end": 64,
        "core": 22,
        "n_centroids": 8192,
        "n_segment": 16,
        "nprobe": 147,
        "max_compute_cluster_num": 147 + int(8192 * 0.232),
        "cache_unit_size": 8,
        "cache_cluster_num": 441,
    }
    assert words[-4:] == ["--budget_ratio", "0.018", "--estimate_ratio", "0.232"]
    assert lost == {"context_length.min"}


def test_v0_says_that_its_scripts_reset_the_cache(profile):
    _, _, lost = exported(profile, "v0")
    assert "cache.fraction" in lost


@pytest.mark.parametrize(
    ("changes", "setting", "reason"),
    [
        ({"geometry.dtype": "float32"}, "kv_precision.keys", "bf16 or fp16"),
        ({"kv_precision.values": "int4"}, "kv_precision.values", "the model's precision"),
        ({"cache.policy": "lru"}, "cache.policy", "wave buffer"),
        ({"overrides": {3: {"sink": 8}}}, "overrides.3.sink", "all layers"),
    ],
)
def test_what_is_lost_is_listed_with_its_reason(variant, changes, setting, reason):
    result = export_profile(variant(**changes), "retroinfer")
    reasons = {item.setting: item.reason for item in result.not_expressible}
    assert reason in reasons[setting]


@pytest.mark.parametrize(
    ("model", "offered", "reason"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", True, None),
        ("someone/Qwen3-4B", False, "load_model()"),
        ("smollm2-135m", False, "Llama and Qwen only"),
    ],
)
def test_models_the_engine_does_not_know(variant, model, offered, reason):
    result = export_profile(variant(**{"model.id": model}), "retroinfer")
    reasons = {item.setting: item.reason for item in result.not_expressible}
    words = next(text for name, text in result.files.items() if name.endswith(".args")).split()
    assert ("--model_name" in words) == offered
    assert f"config/{model.rsplit('/')[-1]}.json" in result.files
    assert (reason is None) == ("model.id" not in reasons)
    if reason:
        assert reason in reasons["model.id"]


@pytest.mark.parametrize(("cores", "core"), [(None, 22), (24, 22), (2, 1), (64, 62)])
def test_threads_follow_the_machine(variant, cores, core):
    config, _, _ = exported(variant(**{"hardware.cores": cores}), "v1")
    assert config["core"] == core
