"""SGLang: a YAML for ``python -m sglang.launch_server --config``."""

from __future__ import annotations

from collections.abc import Mapping

from kvtune.profiles.exporters.base import Exporter, Ledger
from kvtune.profiles.exporters.serving import account_attention, as_yaml, kv_dtype, served_length
from kvtune.profiles.resolved import DENSE

VERSION = "0.5.23"
DTYPES = {"native": "auto", "fp8": "fp8_e4m3"}


def write(ledger: Ledger) -> Mapping[str, str]:
    """``sglang.yaml``. Prefixes are shared by its radix cache without being asked."""
    account_attention(ledger)
    ledger.decline("model.rope", "it takes the rope from the model's config.json: change it there")
    document = {
        "model-path": ledger.profile.model.id,
        "context-length": served_length(ledger),
        "kv-cache-dtype": kv_dtype(ledger, DTYPES),
    }
    return {"sglang.yaml": as_yaml("SGLang", VERSION, document)}


V0_5_23 = Exporter(
    engine="sglang",
    engine_version=VERSION,
    title=f"SGLang {VERSION}",
    write=write,
    usage="python -m sglang.launch_server --config {folder}/sglang.yaml",
    policies=(DENSE,),
    required=False,
)
