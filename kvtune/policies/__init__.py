"""Every method kvtune can model: one file and one row of ``_MODULES`` each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from kvtune.errors import unknown
from kvtune.policies.base import Clusters, Policy, Selection

__all__ = ["Clusters", "Policy", "Selection", "all_policies", "get_policy"]

_MODULES = {
    "a_shape": "AShape",
    "clusterkv": "ClusterKV",
    "ctkvr": "CTkvr",
    "duo_attention": "DuoAttention",
    "full": "Full",
    "h2o": "H2O",
    "infllm": "InfLLM",
    "magicpig": "MagicPIG",
    "oracle_topk": "OracleTopK",
    "pqcache": "PQCache",
    "pyramidkv": "PyramidKV",
    "quest": "Quest",
    "retrieval_attention": "RetrievalAttention",
    "shadowkv": "ShadowKV",
    "sliding_window": "SlidingWindow",
    "snapkv": "SnapKV",
    "streaming": "Streaming",
    "tri_shape": "TriShape",
    "wave_index": "WaveIndex",
}


def all_policies() -> dict[str, type[Policy]]:
    """Policy classes by name, in the order of the table above."""
    return {name: getattr(import_module(f"{__name__}.{name}"), cls) for name, cls in _MODULES.items()}


def get_policy(name: str, parameters: Mapping[str, Any] | None = None) -> Policy:
    """The policy ``name`` with ``parameters``; unknown names and bad values are ``InputError``."""
    policies = all_policies()
    if name not in policies:
        raise unknown("policy", name, policies)
    return policies[name].from_parameters(parameters or {})
