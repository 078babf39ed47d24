"""Stage probes: bodies that run one stage of the decode step at known features, for ``calibrate`` to time.

Here is full attention. The stages of a sparse step overlap, and are timed by what a whole step loses without
them: see :mod:`kvtune.hardware.step_probes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvtune.hardware.cost import Features
from kvtune.hardware.machine import StageName

HEADS, KV_HEADS, DIM = 32, 8, 128
"""The shape of an 8B model's layer."""

CONTEXTS, BATCHES = (4096, 16384, 65536, 131072), (1, 4, 8)
_POOL_BYTES = 4 << 30


@dataclass(frozen=True)
class Probe:
    """``run`` works through ``stage`` at ``features``, ``calls`` times, each on data of its own.

    Data of their own, because in a model the next layer's data are others too: what a cache of the device
    still holds of the last call must not help the next. ``run`` is timed as a CUDA graph where it can be
    captured.
    """

    stage: StageName
    run: Callable[[], object]
    features: Features
    calls: int = 1


def stage_probes(device: torch.device) -> Iterator[Probe]:
    """Probes of every stage that has a kernel for ``device``, made one after another; none without CUDA."""
    if device.type != "cuda":
        return
    yield from full_probes(device)


def full_probes(device: torch.device) -> Iterator[Probe]:
    """Full attention of one step by torch's own kernel: 32 query, 8 kv heads of dimension 128, bfloat16."""
    free, _ = torch.cuda.mem_get_info(device)
    pool = torch.empty(min(_POOL_BYTES, free // 4) // 2, dtype=torch.bfloat16, device=device).normal_()
    for context in CONTEXTS:
        for batch in BATCHES:
            size = 2 * batch * KV_HEADS * context * DIM
            calls = min(pool.numel() // size, 8)
            if calls:
                shape = (calls, 2, batch, KV_HEADS, context, DIM)
                yield _full_probe(pool[: calls * size].view(shape))


def _full_probe(layers: torch.Tensor) -> Probe:
    """Attention over keys and values [calls, 2, batch, kv heads, context, dim]."""
    queries = torch.ones(layers.shape[2], HEADS, 1, DIM, dtype=layers.dtype, device=layers.device)

    def run() -> None:
        for keys, values in layers:
            scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

    return Probe("full", run, Features(float(layers[0].nbytes)), len(layers))
