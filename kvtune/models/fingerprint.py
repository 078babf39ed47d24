"""Identity of a model's weights and of its chat template, the same wherever and however it is loaded."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

_VALUES = 256
"""Values hashed of each parameter."""
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16
"""Blocks hashed of a file."""


def fingerprint(model: PreTrainedModel, config: Any) -> str:
    """Hex digest (16 digits) of the decoder's ``config`` and of strided values of every parameter.

    Values are taken in bfloat16, so that precision, device and transformers' release do not matter, and
    ``config`` is the model's own, before any rope override.
    """
    digest = hashlib.sha256(json.dumps(_essentials(config), sort_keys=True).encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        strided = flat[:: max(1, flat.numel() // _VALUES)][:_VALUES]
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(strided.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def template_hash(tokenizer: Any) -> str:
    """Hex digest (16 digits) of the tokenizer's chat template; empty if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps(template).encode()).hexdigest()[:16] if template else ""


def file_digest(path: Path) -> str:
    """Hex digest (16 digits) of a file's size and of 64 blocks spread over it: cheap for large files."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in range(_BLOCKS):
            file.seek(block * max(0, size - _BLOCK_BYTES) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def _essentials(config: Any) -> dict[str, Any]:
    """What of a configuration decides the computation and is spelled alike by every release."""
    names = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "sliding_window",
        "layer_types",
        "rms_norm_eps",
    )
    found = {name: getattr(config, name, None) for name in names}
    return found | {"rope": getattr(config, "rope_parameters", None)}
