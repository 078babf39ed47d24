"""TensorRT-LLM: a YAML for ``trtllm-serve MODEL --config`` (unknown keys are refused there).

Its RocketKV is another method than any policy of kvtune and is never written for one.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from kvtune.profiles.exporters.base import Exporter, Ledger
from kvtune.profiles.exporters.serving import (
    account_attention,
    as_yaml,
    kv_dtype,
    served_length,
    shares_prefixes,
)
from kvtune.profiles.resolved import DENSE

VERSION = "1.4.0rc4"
DTYPES = {"native": "auto", "fp8": "fp8"}


def write(ledger: Ledger) -> Mapping[str, str]:
    """``trtllm.yaml``, and ``trtllm.args`` with the model, which the command line takes as an argument."""
    account_attention(ledger)
    ledger.decline("model.rope", "it takes the rope from the model's config.json: change it there")
    document = {
        "max_seq_len": served_length(ledger),
        "enable_chunked_prefill": True,
        "kv_cache_config": {
            "dtype": kv_dtype(ledger, DTYPES),
            "enable_block_reuse": shares_prefixes(ledger),
        },
    }
    return {
        "trtllm.yaml": as_yaml("TensorRT-LLM", VERSION, document),
        "trtllm.args": shlex.quote(ledger.profile.model.id) + "\n",
    }


V1_4 = Exporter(
    engine="tensorrt_llm",
    engine_version=VERSION,
    title=f"TensorRT-LLM {VERSION}",
    write=write,
    usage="trtllm-serve $(cat {folder}/trtllm.args) --config {folder}/trtllm.yaml",
    policies=(DENSE,),
    required=False,
)
