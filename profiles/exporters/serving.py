"""What the exporters of serving engines share: full attention, one KV dtype, a length limit, shared prefixes.

None of these engines has a portable, training-free sparse decode for grouped-query models: a retrieval
profile keeps there what is not about retrieval, and everything else is listed as not expressible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from kvtune import __version__
from kvtune.profiles.exporters.base import Ledger
from kvtune.profiles.resolved import DENSE

FULL_ONLY = "its decode attention reads every token: there is no sparse decode for this model family"


def account_attention(ledger: Ledger) -> None:
    """Full attention in every layer: the policy is expressed where that is what the profile asks for."""
    ledger.express("model.id")
    if ledger.profile.policy.name == DENSE:
        ledger.express("policy.name", "dense_layers")
    else:
        ledger.decline("policy", FULL_ONLY)
        ledger.decline("overrides", FULL_ONLY)
        ledger.decline("dense_layers", "every layer is dense")
    ledger.decline("cache", "full attention needs all keys and values of a running sequence on the GPU")


def served_length(ledger: Ledger) -> int:
    """Tokens a sequence may have: the context and the answers measured, within the model's positions."""
    profile, context = ledger.profile, ledger.resolved.context_length
    answer = profile.workload.decode_steps if profile.workload else 0
    length = min(context + answer, profile.geometry.max_positions)
    if length >= profile.context_length.max:
        ledger.express("context_length.min", "context_length.max")
    else:
        ledger.decline("context_length", f"sequences are limited to {length} tokens")
    return length


def kv_dtype(ledger: Ledger, names: Mapping[str, str]) -> str:
    """The engine's name for the profile's KV precision, from {precision: engine's name}.

    Keys and values must agree and be known; else both are declined and the model's own precision is kept.
    """
    keys, values = ledger.profile.kv_precision.keys, ledger.profile.kv_precision.values
    if keys == values and keys in names:
        ledger.express("kv_precision.keys", "kv_precision.values")
        return names[keys]
    for name, own in (("keys", keys), ("values", values)):
        reason = "keys and values have one dtype there" if keys != values else f"it has no {own} KV cache"
        ledger.decline(f"kv_precision.{name}", reason)
    return names["native"]


def shares_prefixes(ledger: Ledger) -> bool:
    """Whether the workload sends a context more than once (several requests, or turns that grow it)."""
    workload = ledger.profile.workload
    return workload is not None and (workload.requests > 1 or workload.turns > 1)


def as_yaml(engine: str, version: str, document: Mapping[str, Any]) -> str:
    """YAML with a first line that says for which engine and version it is."""
    head = f"# {engine} {version}, written by kvtune {__version__}\n"
    return head + yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=100)
