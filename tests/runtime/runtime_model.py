"""A tiny random Llama that the runtime tests share."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtune.geometry import ModelGeometry
from kvtune.models import LoadedModel
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.workloads import Request, Sample, Turn

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    initializer_range=0.4,
)
GEOMETRY = ModelGeometry(
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    head_dim=8,
    value_dim=8,
    dtype="float32",
    max_positions=4096,
    scaling=8**-0.5,
    windows=(None,) * 3,
    softcaps=(None,) * 3,
    sinks=(False,) * 3,
)


def tiny_model() -> LlamaForCausalLM:
    """Three layers, 6 query and 2 kv heads, weights large enough that attention matters."""
    torch.manual_seed(0)
    return LlamaForCausalLM(copy.deepcopy(CONFIG)).eval()


LIVE: dict[str, tuple[str, dict[str, object]]] = {
    "clusterkv": ("clusterkv", {"token_budget": 100, "update_interval": 8, "update_nlist": 2}),
    "ctkvr": ("ctkvr", {"top_k": 60, "rho": 200, "n_centroids": 50}),
    "ctkvr_dynamic": ("ctkvr", {"top_k": 60, "rho": 200, "n_centroids": 50, "dynamic": 3}),
    "duo_attention": ("duo_attention", {"coverage": 0.6, "prompt_queries": 16}),
    "full": ("full", {}),
    "infllm": ("infllm", {"n_init": 16, "n_local": 64, "block": 8, "topk": 2}),
    "magicpig": ("magicpig", {"tables": 40, "bits": 6, "local": 32}),
    "oracle_topk": ("oracle_topk", {"tokens": 100}),
    "pqcache": ("pqcache", {"token_budget": 96, "bits": 4}),
    "quest": ("quest", {"token_budget": 96, "page_size": 8}),
    "retrieval_attention": (
        "retrieval_attention",
        {"top_k": 64, "sink": 16, "recent": 64, "update_interval": 8},
    ),
    "shadowkv": ("shadowkv", {"sparse_budget": 64, "outlier_chunks": 4}),
    "sliding_window": ("sliding_window", {"window": 200}),
    "streaming": ("streaming", {"recent": 200}),
    "tri_shape": ("tri_shape", {"sink": 16, "recent": 200, "n_last": 5}),
    "a_shape": ("a_shape", {"sink": 16, "recent": 200}),
    "wave_index": ("wave_index", {"retrieval": 0.1, "segment": 512}),
}
"""Every policy that does not evict, so small that it selects and that its index grows while decoding."""


def live_plan(case: str) -> Plan:
    """The plan of a row of :data:`LIVE`."""
    name, parameters = LIVE[case]
    return Plan(get_policy(name, parameters))


def loaded_tiny(device: str = "cpu", **geometry: Any) -> LoadedModel:
    """The tiny model without a tokenizer on ``device``; fields of its geometry may be replaced."""
    return LoadedModel(
        tiny_model().to(device), None, dataclasses.replace(GEOMETRY, **geometry), "tiny", "f00d", ""
    )


def random_ids(n: int, seed: int = 0) -> tuple[int, ...]:
    """``n`` tokens, none of them an end of text."""
    return tuple(torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


CONTEXT = random_ids(1250, 1)
SAMPLE = Sample(
    "tiny",
    CONTEXT,
    (
        Request((Turn("q", random_ids(20, 2), "a", random_ids(5, 3)),
                 Turn("q", random_ids(9, 4), "a", random_ids(3, 5)))),
        Request((Turn("q", random_ids(1, 6), None, ()),)),
    ),
)  # fmt: skip
"""Two requests over one context: two turns with references, and one without."""


def single(sample: Sample, request: int = 0) -> Sample:
    """The sample with one of its requests alone."""
    return dataclasses.replace(sample, requests=(sample.requests[request],))
