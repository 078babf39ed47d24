"""The scan of an index: scores of every centroid, or bounds of every page, for one decode step.

A unit is one kv head of one sequence. The device reads each centroid once for all query heads of its group;
products are of operands at the model's precision with float32 sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtune.kernels.tiles import ROWS, padded

_TILE, _TILES, _WARPS, _STAGES = 64, 4, 4, 3


def empty_stats(units: int, group: int, width: int, device: torch.device | str) -> Tensor:
    """Room for the softmax statistics of ``width`` scores, [2, U, parts, G] float32: peaks, then sums.

    A part's sum is of e^(score - peak) over its scores.
    """
    parts = triton.cdiv(max(width, 1), _TILE * _TILES)
    return torch.zeros(2, units, parts, group, dtype=torch.float32, device=device)


def centroid_logits(
    queries: Tensor,
    centroids: Tensor,
    visible: Tensor,
    logits: Tensor,
    stats: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> None:
    """Fill ``logits`` [U, G, C] (float32) with the scaled, capped scores of the first ``visible`` [U] ones.

    queries [U, G, d], centroids [U, C, d], visible [U] int32; what lies beyond stays as it was. ``stats``
    (:func:`empty_stats`) gets what a softmax over them needs.
    """
    _scan(queries, centroids, centroids, visible, logits, stats, scaling, softcap, bounds=False)


def page_bounds(
    queries: Tensor,
    low: Tensor,
    high: Tensor,
    visible: Tensor,
    logits: Tensor,
    stats: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> None:
    """Fill ``logits`` [U, G, P] with Quest's bound on q·k over each page (arXiv 2406.10774), scaled, capped.

    low, high [U, P, d]: the smallest and largest value of every channel in a page; else as
    :func:`centroid_logits`.
    """
    _scan(queries, low, high, visible, logits, stats, scaling, softcap, bounds=True)


def _scan(
    queries: Tensor,
    low: Tensor,
    high: Tensor,
    visible: Tensor,
    logits: Tensor,
    stats: Tensor,
    scaling: float,
    softcap: float | None,
    bounds: bool,
) -> None:
    units, group, dim = queries.shape
    width = low.shape[1]
    _scan_kernel[(triton.cdiv(width, _TILE * _TILES), units)](
        queries, low, high, visible, logits, stats,
        low.stride(0), units, width, dim, group, scaling, softcap or 0.0,
        DIM=padded(dim), GROUP=ROWS, TILE=_TILE, TILES=_TILES, STAGES=_STAGES,
        SOFTCAP=softcap is not None, BOUNDS=bounds, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _scan_kernel(
    queries, low, high, visible, logits, stats, stride, units, width, dim, group, scaling, softcap,
    DIM: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, SOFTCAP: tl.constexpr, BOUNDS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    count = tl.load(visible + unit)
    first = tl.program_id(0) * TILE * TILES
    rows, columns = tl.arange(0, GROUP), tl.arange(0, DIM)
    query = tl.load(
        queries + (unit * group + rows[:, None]) * dim + columns[None, :],
        mask=(rows < group)[:, None] & (columns < dim)[None, :],
        other=0.0,
    )
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    for at in tl.range(first, tl.minimum(first + TILE * TILES, count), TILE, num_stages=STAGES):
        entry = at + tl.arange(0, TILE)
        shown = (entry < count)[:, None] & (columns < dim)[None, :]
        place = unit * stride + entry.to(tl.int64)[:, None] * dim + columns[None, :]
        top = tl.load(high + place, mask=shown, other=0.0)
        if BOUNDS:
            bottom = tl.load(low + place, mask=shown, other=0.0)
            above = tl.maximum(query, 0.0).to(query.dtype)
            below = tl.minimum(query, 0.0).to(query.dtype)
            scores = tl.dot(above, tl.trans(top), input_precision="ieee")
            scores = tl.dot(below, tl.trans(bottom), scores, input_precision="ieee")
        else:
            scores = tl.dot(query, tl.trans(top), input_precision="ieee")
        scores = scores * scaling
        if SOFTCAP:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        out = logits + (unit * group + rows[:, None]) * width + entry[None, :]
        tl.store(out, scores, mask=(rows < group)[:, None] & (entry < count)[None, :])
        scores = tl.where((entry < count)[None, :], scores, float("-inf"))
        new = tl.maximum(peak, tl.max(scores, 1))
        total = total * tl.exp(peak - new) + tl.sum(tl.exp(scores - new[:, None]), 1)
        peak = new
    part = (unit * tl.num_programs(0) + tl.program_id(0)) * group + rows
    tl.store(stats + part, peak, mask=rows < group)
    tl.store(stats + units * tl.num_programs(0) * group + part, total, mask=rows < group)
