"""Whether a run fits the GPU and the host, asked before anything large is read."""

from __future__ import annotations

from pathlib import Path

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
    """Free bytes of a GPU, those held in reserve by torch included; ``None`` for another device."""
    if device.type != "cuda":
        return None
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


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


def check_layers(layers: int, rows: int, row_bytes: int, device: int | None, host: int | None) -> None:
    """Refuse a fused decoder of ``layers`` layers whose keys and values have no room.

    ``rows`` tokens of ``row_bytes`` a layer: on the device (``device`` free bytes; the index takes about an
    eighth more), or with ``host`` free bytes in host memory, one layer at a time passing through the device.
    ``None``: not asked. Raises ``InputError``.
    """
    layer = rows * row_bytes
    needed = layers * layer * 9 // 8 if host is None else 2 * layer
    if device is not None and needed > device:
        raise InputError(
            f"the plan's own keys and values and its index need about {_gib(needed)} on the GPU beside the "
            f"model's, but {_gib(device)} are free",
            "use --offload cpu, or lower --context" if host is None else "lower --context",
        )
    if host is not None and layers * layer > host:
        raise InputError(
            f"keys and values of {layers} layers need {_gib(layers * layer)} of pinned host memory, but "
            f"{_gib(host)} are free",
            "use --offload none, or lower --context",
        )


def check_batch(
    geometry: ModelGeometry,
    size: int,
    rows: int,
    cached: float | None,
    device: int | None,
    host: int | None,
) -> None:
    """Refuse to decode ``size`` sequences together, each in ``rows`` tokens of memory, without room for it.

    Counted are the sequences' own keys and values with an index of an eighth more, and one or two further
    sequences: the one that is being prefilled, and its decoding alone. ``cached``: the share of a sequence
    whose keys and values stay on the device, the rest going to host memory (``None``: all stay). ``device``
    and ``host`` are free bytes (``None``: not asked). Raises ``InputError`` that says what would fit.
    """
    kv = rows * geometry.kv_bytes_per_token
    layer = kv // geometry.n_layers
    if cached is None:
        each, first, in_host = kv * 9 // 8, kv * 9 // 4, 0
    else:  # an eighth of index, an eighth of buffers, and a layer on its way to the host
        each = int(kv * (cached + 0.25)) + 2 * layer
        first, in_host = kv + each, kv + 2 * layer
    for free, one, fixed, place in (
        (device, each, first + WORKING_BYTES, "on the GPU"),
        (host, in_host, 0, "of host memory"),
    ):
        if free is None or fixed + size * one <= free:
            continue
        fits = max(free - fixed, 0) // one
        raise InputError(
            f"{size} sequences together need about {_gib(fixed + size * one)} {place}, but "
            f"{_gib(free)} are free",
            f"a batch of {fits} would fit: use --batch {fits}" if fits else "lower --context",
        )


def free_host_bytes() -> int | None:
    """Host memory that can be had without swapping, ``None`` where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
