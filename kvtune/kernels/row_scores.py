"""Exact scores of listed rows, for one decode step: the scan over keys that lie anywhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtune.kernels.tiles import ROWS, padded

_TILE, _PARTS = 64, 128


def empty_row_stats(units: int, group: int, width: int, device: torch.device | str) -> Tensor:
    """Room for the softmax statistics of at most ``width`` rows' scores, [2, U, parts, G] float32."""
    parts = min(_PARTS, triton.cdiv(max(width, 1), _TILE))
    return torch.zeros(2, units, parts, group, dtype=torch.float32, device=device)


def row_logits(
    queries: Tensor,
    keys: Tensor,
    rows: Tensor,
    n_rows: Tensor,
    logits: Tensor,
    stats: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> None:
    """Fill ``logits`` [U, G, S] (float32) with the scaled, capped scores of the first ``n_rows`` [U] ones.

    queries [U, G, d], keys [U, N, d] (within a unit contiguous), rows [U, S] int32; what lies beyond stays as
    it was. ``stats`` (:func:`empty_row_stats`) gets what a softmax over them needs.
    """
    units, group, dim = queries.shape
    width, parts = rows.shape[1], stats.shape[2]
    chunk = triton.cdiv(triton.cdiv(width, _TILE), parts) * _TILE
    _row_kernel[(parts, units)](
        queries, keys, rows, n_rows, logits, stats,
        keys.stride(0), units, width, chunk, dim, group, scaling, softcap or 0.0,
        DIM=padded(dim), GROUP=ROWS, TILE=_TILE, SOFTCAP=softcap is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _row_kernel(
    queries, keys, rows, n_rows, logits, stats, stride, units, width, chunk, dim, group, scaling, softcap,
    DIM: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    unit, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * chunk
    count = tl.load(n_rows + unit)
    head, channel = tl.arange(0, GROUP), tl.arange(0, DIM)
    query = tl.load(
        queries + (unit * group + head[:, None]) * dim + channel[None, :],
        mask=(head < group)[:, None] & (channel < dim)[None, :],
        other=0.0,
    )
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    for at in range(first, tl.minimum(first + chunk, count), TILE):
        slot = at + tl.arange(0, TILE)
        row = tl.load(rows + unit * width + slot, mask=slot < count, other=0).to(tl.int64)
        key = tl.load(
            keys + unit * stride + row[:, None] * dim + channel[None, :],
            mask=(slot < count)[:, None] & (channel < dim)[None, :],
            other=0.0,
        )
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        if SOFTCAP:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        out = logits + (unit * group + head[:, None]) * width + slot[None, :]
        tl.store(out, scores, mask=(head < group)[:, None] & (slot < count)[None, :])
        scores = tl.where((slot < count)[None, :], scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        total = total * tl.exp(peak - new) + tl.sum(tl.exp(scores - new[:, None]), 1)
        peak = new
    part = (unit * tl.num_programs(0) + tl.program_id(0)) * group + head
    tl.store(stats + part, peak, mask=head < group)
    tl.store(stats + units * tl.num_programs(0) * group + part, total, mask=head < group)
