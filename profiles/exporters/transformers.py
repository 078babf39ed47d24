"""Hugging Face transformers: a JSON for kvtune's own runtime and a short script that applies it.

transformers has no retrieval attention of its own; ``kvtune.runtime.apply_profile`` registers one through
its ``AttentionInterface``. The JSON is the profile at one context length, without its evidence.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvtune import __version__
from kvtune.profiles.exporters.base import Exporter, Ledger, as_json

RUNTIME_FORMAT = 1
VERSION = "5.24.0"

_SCRIPT = '''\
"""Generate text with the KV cache settings of a kvtune profile.

Written by kvtune {kvtune} for transformers {version}. Run: python run_profile.py "a prompt"
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvtune.models import Rope, load_model
from kvtune.runtime import apply_profile

MODEL = {model!r}
FINGERPRINT = {fingerprint!r}
ROPE = Rope({override!r}, {length!r})
PROFILE = Path(__file__).with_name("profile.json")


def main(prompt: str, new_tokens: int = 64) -> str:
    """The model's continuation of ``prompt``."""
    loaded = load_model(MODEL, dtype={dtype!r}, rope=ROPE)
    if loaded.fingerprint != FINGERPRINT:
        sys.exit(f"the profile is for weights {{FINGERPRINT}}, {{MODEL}} has {{loaded.fingerprint}}")
    apply_profile(loaded.model, PROFILE)
    inputs = loaded.tokenizer(prompt, return_tensors="pt").to(loaded.device)
    tokens = loaded.model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return loaded.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    print(main(sys.argv[1]))
'''


def write(ledger: Ledger) -> Mapping[str, str]:
    """``profile.json`` and ``run_profile.py``; kvtune's runtime runs every policy, layer by layer."""
    profile, resolved = ledger.profile, ledger.resolved
    document = {
        "kvtune_runtime": RUNTIME_FORMAT,
        "model": profile.model.id,
        "fingerprint": profile.model.fingerprint,
        "context_length": resolved.context_length,
        "policy": resolved.policy,
        "parameters": resolved.parameters,
        "overrides": {str(layer): own for layer, own in resolved.overrides.items()},
        "dense_layers": list(resolved.dense_layers),
        "cache": profile.cache.model_dump() if profile.cache else None,
    }
    rope = profile.model.rope
    script = _SCRIPT.format(
        model=profile.model.id,
        fingerprint=profile.model.fingerprint,
        override=rope.override if rope else None,
        length=rope.length if rope else None,
        kvtune=__version__,
        version=VERSION,
        dtype=profile.geometry.dtype,
    )
    _account(ledger)
    return {"profile.json": as_json(document), "run_profile.py": script}


V5_24 = Exporter(
    engine="transformers",
    engine_version=VERSION,
    title=f"kvtune's runtime on transformers {VERSION}",
    write=write,
    usage="python {folder}/run_profile.py 'a prompt'",
)


def _account(ledger: Ledger) -> None:
    ledger.express("model.id", "model.rope.override", "model.rope.length", "policy.name", "dense_layers")
    ledger.express("context_length.min", "context_length.max", "cache.policy", "cache.fraction")
    ledger.express(*(f"policy.parameters.{name}" for name in ledger.profile.policy.parameters))
    ledger.express(
        *(f"overrides.{layer}.{name}" for layer, own in ledger.profile.overrides.items() for name in own)
    )
    for name in ("keys", "values"):
        if getattr(ledger.profile.kv_precision, name) == "native":
            ledger.express(f"kv_precision.{name}")
        else:
            ledger.decline(f"kv_precision.{name}", "the runtime keeps the model's own precision")
