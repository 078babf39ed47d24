"""LMCache beside vLLM: a CPU tier that keeps the contexts of a workload, and the connector that uses it.

LMCache moves prefixes between tiers and leaves attention alone: of a profile it needs only the geometry, the
length and whether contexts come again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kvtune.profiles.exporters.base import Exporter, Ledger, as_json
from kvtune.profiles.exporters.serving import account_attention, as_yaml, served_length
from kvtune.profiles.resolved import DENSE

VERSION = "0.5.6"
CHUNK_TOKENS = 256
GIB = 1 << 30
CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def write(ledger: Ledger) -> Mapping[str, str]:
    """``lmcache.yaml`` and vLLM's ``kv-transfer-config.json``.

    The tier holds one sequence of the served length, in whole chunks (its size is per tensor-parallel
    rank; this is the whole cache, so it suffices for any number of ranks).
    """
    account_attention(ledger)
    ledger.decline("model", "it serves whatever model its engine runs")
    native = ledger.profile.kv_precision
    for name in ("keys", "values"):
        if getattr(native, name) == "native":
            ledger.express(f"kv_precision.{name}")
        else:
            ledger.decline(f"kv_precision.{name}", "it stores what its engine gives it")
    chunks = math.ceil(served_length(ledger) / CHUNK_TOKENS)
    size = chunks * CHUNK_TOKENS * ledger.profile.geometry.to_model().kv_bytes_per_token
    document = {
        "chunk_size": CHUNK_TOKENS,
        "local_cpu": True,
        "max_local_cpu_size": max(1, math.ceil(size / GIB)),
        "cache_policy": "LRU",
    }
    return {
        "lmcache.yaml": as_yaml("LMCache", VERSION, document),
        "kv-transfer-config.json": as_json(CONNECTOR),
    }


V0_5_6 = Exporter(
    engine="lmcache",
    engine_version=VERSION,
    title=f"LMCache {VERSION}",
    write=write,
    usage="LMCACHE_CONFIG_FILE={folder}/lmcache.yaml vllm serve MODEL "
    '--kv-transfer-config "$(cat {folder}/kv-transfer-config.json)"',
    policies=(DENSE,),
    required=False,
)
