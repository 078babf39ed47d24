"""What the device can do, one measurement a function. Without a GPU the device is the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvtune.hardware.clock import graphed, seconds_of, wall_seconds_of
from kvtune.hardware.machine import GatherRate

ROW_BYTES = (256, 2048)
"""Rows that are gathered: one key of 128 16-bit values, and a page's eight."""

_HIDDEN, _WIDE, _HEAD = 4096, 14336, 128
_SHORT = 16
"""Layers in the graph that times one layer's overhead."""


def read_rate(device: torch.device, n_bytes: int, repeats: int) -> float:
    """Bytes per second of reading ``n_bytes`` once: the better of a sum and a matrix-vector product."""
    matrix = torch.ones(max(n_bytes // (4 * 4096), 1), 4096, dtype=torch.float32, device=device)
    vector = torch.ones(4096, dtype=torch.float32, device=device)
    best = min(
        seconds_of(matrix.sum, device, repeats),
        seconds_of(partial(torch.mv, matrix, vector), device, repeats),
    )
    return matrix.nbytes / best


def copy_rate(device: torch.device, n_bytes: int, repeats: int) -> float:
    """Bytes per second of a copy of ``n_bytes``, those read and those written."""
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / seconds_of(partial(target.copy_, source), device, repeats)


def gather_rates(device: torch.device, n_bytes: int, repeats: int) -> tuple[GatherRate, ...]:
    """Bytes per second of gathering half of ``n_bytes`` in rows at random, those read and those written."""
    return tuple(
        GatherRate(row_bytes=row, bytes_per_second=_gather_rate(device, n_bytes, row, repeats))
        for row in ROW_BYTES
    )


def _gather_rate(device: torch.device, n_bytes: int, row_bytes: int, repeats: int) -> float:
    rows = torch.ones(max(n_bytes // row_bytes, 2), row_bytes // 2, dtype=torch.bfloat16, device=device)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(rows), generator=generator)[: len(rows) // 2].to(device)
    target = torch.empty(len(chosen), rows.shape[1], dtype=rows.dtype, device=device)
    body = partial(torch.index_select, rows, 0, chosen, out=target)
    return 2 * target.nbytes / seconds_of(body, device, repeats)


def matmul_rate(device: torch.device, size: int, repeats: int) -> float:
    """Floating-point operations per second of a square bfloat16 matrix product."""
    left = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    right, target = torch.ones_like(left), torch.empty_like(left)
    return 2.0 * size**3 / seconds_of(partial(torch.mm, left, right, out=target), device, repeats)


def kernel_seconds(device: torch.device, count: int, repeats: int) -> float:
    """Starting one small kernel from Python, ``count`` of them back to back."""
    return wall_seconds_of(_small_kernels(device, count), device, repeats) / count


def node_seconds(device: torch.device, count: int, repeats: int) -> float | None:
    """One small kernel as a node of a CUDA graph that follows another; ``None`` where there are no graphs."""
    replay = graphed(_small_kernels(device, count), device)
    return None if replay is None else seconds_of(replay, device, repeats) / count


def layer_overhead(device: torch.device, repeats: int) -> float:
    """A decoder layer's norms, rotary positions, residuals and activation, one token, of an 8B model's width.

    In a CUDA graph where there are graphs.
    """
    body = _layers_without_products(device)
    return seconds_of(graphed(body, device) or body, device, repeats) / _SHORT


def _small_kernels(device: torch.device, count: int) -> Callable[[], None]:
    number = torch.zeros(1, device=device)

    def body() -> None:
        for _ in range(count):
            number.add_(1.0)

    return body


def _layers_without_products(device: torch.device) -> Callable[[], None]:
    dtype = torch.bfloat16
    hidden = torch.ones(1, _HIDDEN, dtype=dtype, device=device)
    wide = torch.ones(1, _WIDE, dtype=dtype, device=device)
    queries = torch.ones(_HIDDEN // _HEAD, _HEAD, dtype=dtype, device=device)
    keys, angles = queries[:8].clone(), torch.ones(_HEAD, dtype=dtype, device=device)

    def body() -> None:
        for _ in range(_SHORT):
            _norm(hidden)
            _rotate(queries, angles)
            _rotate(keys, angles)
            torch.add(hidden, hidden)
            _norm(hidden)
            torch.mul(torch.nn.functional.silu(wide), wide)
            torch.add(hidden, hidden)

    return body


def _norm(hidden: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), hidden[0])


def _rotate(vectors: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions as the reference implementations write them."""
    half = vectors.shape[-1] // 2
    turned = torch.cat([-vectors[..., half:], vectors[..., :half]], -1)
    return vectors * angles + turned * angles
