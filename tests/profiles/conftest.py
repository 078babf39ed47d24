"""A complete profile as plain data, and a maker of variants."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvtune.profiles import Profile, parse_profile

N_LAYERS = 4

DATA: dict[str, Any] = {
    "kvtune_profile": 1,
    "model": {"id": "meta-llama/Llama-3.1-8B-Instruct", "fingerprint": "sha256:0123"},
    "geometry": {
        "n_layers": N_LAYERS,
        "n_heads": 8,
        "n_kv_heads": 2,
        "head_dim": 64,
        "value_dim": 64,
        "dtype": "bfloat16",
        "max_positions": 131072,
        "scaling": 0.125,
        "windows": [None] * N_LAYERS,
        "softcaps": [None] * N_LAYERS,
        "sinks": [False] * N_LAYERS,
        "alibi": False,
        "rope": {"rope_type": "yarn", "factor": 4.0},
    },
    "context_length": {"min": 8192, "max": 131072},
    "policy": {
        "name": "wave_index",
        "parameters": {
            "retrieval": 0.018,
            "estimation": 0.232,
            "tokens_per_centroid": 16,
            "segment": 8192,
            "sink": 4,
            "local": 64,
        },
    },
    "overrides": {2: {"retrieval": 0.05}},
    "dense_layers": [0, 1],
    "cache": {"policy": "wave", "fraction": 0.05},
    "kv_precision": {"keys": "native", "values": "native"},
    "workload": {"task": "code_search", "samples": 4, "turns": 2, "decode_steps": 64},
    "hardware": {"name": "one H200", "device": "cuda", "memory_bytes": 150_000_000_000, "cores": 24},
    "predicted": {
        "output_error": {
            "mean": {"value": 0.05, "low": 0.04, "high": 0.06},
            "p95": {"value": 0.2, "low": 0.15, "high": 0.25},
        },
        "read_bytes_per_step": {"value": 1.0e6, "low": 0.9e6, "high": 1.1e6},
        "hit_ratio": {"value": 0.9, "low": 0.88, "high": 0.92},
    },
    "held_out": {
        "samples": 2,
        "chosen": {"output_error": {"mean": 0.05, "p95": 0.2}, "read_bytes_per_step": 1.0e6},
        "default": {"output_error": {"mean": 0.08, "p95": 0.4}, "read_bytes_per_step": 1.0e6},
        "winner": "chosen",
        "difference": {"value": -0.03, "low": -0.04, "high": -0.02},
    },
    "provenance": {"kvtune": "0.1.0", "trace": "code.trace", "seed": 0, "trials": 60},
}


def replaced(changes: dict[str, Any]) -> dict[str, Any]:
    """The complete profile's data with dotted keys replaced (``...`` removes one)."""
    data = copy.deepcopy(DATA)
    for key, value in changes.items():
        *parents, last = key.split(".")
        node: Any = data
        for part in parents:
            node = node[part]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return data


@pytest.fixture
def data() -> dict[str, Any]:
    return copy.deepcopy(DATA)


@pytest.fixture
def profile() -> Profile:
    return parse_profile(DATA)


@pytest.fixture(scope="session")
def complete() -> dict[str, Any]:
    """The complete profile's data, not to be changed."""
    return DATA


@pytest.fixture
def changed() -> Callable[[str, Any], dict[str, Any]]:
    """``changed("policy.name", "full")``: the complete data with one key replaced."""
    return lambda key, value: replaced({key: value})


@pytest.fixture
def variant() -> Callable[..., Profile]:
    """``variant(**{"policy.name": "full"})``: the complete profile with keys replaced."""
    return lambda **changes: parse_profile(replaced(changes))
