"""Whether a run fits the GPU, asked before anything large is read."""

from __future__ import annotations

import torch

from kvtune.errors import InputError
from kvtune.geometry import ITEM_BYTES, ModelGeometry
from kvtune.models.adapters import count_parameters
from kvtune.models.loading import ModelFiles, choose_dtype
from kvtune.models.rope import Rope

WORKING_BYTES = 1 << 29
"""Activations and masks of a prefill chunk, logits and the allocator's own: half a GiB, roughly."""


def check_room(files: ModelFiles, rope: Rope, dtype: str, device: torch.device, longest: int) -> None:
    """Refuse a run of ``longest`` tokens for which ``device`` has no room (only GPUs are asked).

    Raises ``InputError`` that says what would fit.
    """
    free = free_bytes(device)
    if free is None:
        return
    config, _ = files.resolved(rope)
    precision = choose_dtype(dtype, device, config)
    weights = count_parameters(config) * ITEM_BYTES[precision]
    check_fit(files.geometry(precision, rope), weights, longest, free)


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of a GPU; ``None`` for another device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def check_fit(geometry: ModelGeometry, weights: int, longest: int, free: int) -> None:
    """``InputError`` where ``weights`` bytes, the keys and values of ``longest`` tokens and the work do not
    fit into ``free`` bytes.

    A token takes its keys and values in all layers, and those of one layer once more, repeated for every
    query head, as attention over a chunk does.
    """
    repeated = geometry.n_heads * (geometry.head_dim + geometry.value_dim) * geometry.item_bytes
    token = geometry.kv_bytes_per_token + repeated
    room = free - weights - WORKING_BYTES
    if longest * token <= room:
        return
    needed = weights + longest * token + WORKING_BYTES
    fits = max(room, 0) // token
    raise InputError(
        f"{longest:,} tokens need about {_gib(needed)} on the GPU ({_gib(weights)} of weights, "
        f"{_gib(longest * geometry.kv_bytes_per_token)} of keys and values), but {_gib(free)} are free",
        f"about {fits:,} tokens would fit: lower --context" if fits >= 1024 else "use --device cpu",
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
