"""Asymmetric integer codes in groups along the last axis: a minimum and a step for each group."""

from __future__ import annotations

import torch
from torch import Tensor


def code_groups(vectors: Tensor, bits: int, group: int) -> Tensor:
    """Quantise and dequantise [..., d] in groups of ``group`` along d (the last may be smaller), float32.

    x becomes low + step · round((x - low) / step) with low the group's minimum and step its range divided
    by 2^bits - 1. Both are stored in the precision of ``vectors``: the minimum is exact there, the step is
    rounded up, so that the codes always reach the maximum. A constant group comes back exactly.
    """
    rows = _grouped(vectors, group)
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    levels = 2**bits - 1
    step = _rounded_up((high - low) / levels, vectors.dtype)
    codes = torch.round((rows - low) / torch.where(step == 0, 1.0, step)).clamp(0, levels)
    return (low + codes * step).flatten(-2)[..., : vectors.shape[-1]]


def bound_groups(vectors: Tensor, bits: int, group: int) -> Tensor:
    """Bound of the error of :func:`code_groups`, [..., d] float32: half a step, and float32's rounding.

    A step is at most range / (2^bits - 1) · (1 + ε), or one subnormal more, ε that of the stored precision.
    """
    rows = _grouped(vectors, group)
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    stored, single = torch.finfo(vectors.dtype), torch.finfo(torch.float32)
    step = (high - low) / (2**bits - 1) * (1 + stored.eps) + stored.smallest_normal * stored.eps
    rounding = 8 * single.eps * torch.maximum(low.abs(), high.abs())
    bound = torch.where(high > low, step / 2 + rounding, 0.0)
    return bound.expand_as(rows).flatten(-2)[..., : vectors.shape[-1]]


def group_bytes(dim: int, bits: int, group: int, item_bytes: int) -> int:
    """Bytes of ``dim`` channels coded in groups: packed codes, a minimum and a step for each group."""
    return -(-dim * bits // 8) + 2 * item_bytes * -(-dim // group)


def _grouped(vectors: Tensor, group: int) -> Tensor:
    """[..., d] → [..., n, group] float32; a last partial group is filled with its last channel."""
    rows = vectors.float()
    missing = -rows.shape[-1] % group
    if missing:
        rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], missing)], -1)
    return rows.unflatten(-1, (-1, group))


def _rounded_up(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Non-negative float32 numbers as the next number of ``dtype`` that is not smaller, in float32."""
    stored = numbers.to(dtype)
    if dtype == torch.float32:
        return stored
    above = (stored.view(torch.int16) + 1).view(dtype)
    return torch.where(stored.float() < numbers, above, stored).float()
