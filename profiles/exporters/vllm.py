"""vLLM: a YAML for ``vllm serve --config`` (flat keys, lists expand, dicts become JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtune.profiles.exporters.base import Exporter, Ledger
from kvtune.profiles.exporters.serving import (
    account_attention,
    as_yaml,
    kv_dtype,
    served_length,
    shares_prefixes,
)
from kvtune.profiles.resolved import DENSE

VERSION = "0.33.0"
DTYPES = {
    "native": "auto",
    "fp8": "fp8",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
}
PER_TOKEN_HEAD = {"attention-backend": "TRITON_ATTN", "block-size": 16}
"""Integer KV caches run on the Triton backend only, whose blocks are multiples of 16 tokens."""


def write(ledger: Ledger) -> Mapping[str, str]:
    """``vllm.yaml``. A rope override becomes ``hf-overrides``, with the length it reaches."""
    account_attention(ledger)
    geometry, model = ledger.profile.geometry, ledger.profile.model
    dtype = kv_dtype(ledger, DTYPES)
    document: dict[str, Any] = {
        "model": model.id,
        "max-model-len": served_length(ledger),
        "kv-cache-dtype": dtype,
        "enable-chunked-prefill": True,
    }
    if dtype.endswith("per_token_head"):
        document |= PER_TOKEN_HEAD
    if shares_prefixes(ledger):
        document["enable-prefix-caching"] = True
    if model.rope is not None:
        ledger.express("model.rope.override", "model.rope.length")
        document["hf-overrides"] = {
            "rope_parameters": geometry.rope,
            "max_position_embeddings": geometry.max_positions,
        }
    return {"vllm.yaml": as_yaml("vLLM", VERSION, document)}


V0_33 = Exporter(
    engine="vllm",
    engine_version=VERSION,
    title=f"vLLM {VERSION}",
    write=write,
    usage="vllm serve --config {folder}/vllm.yaml",
    policies=(DENSE,),
    required=False,
)
