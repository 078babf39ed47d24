"""One decode step of sparse attention: exact rows and estimated clusters, split over programs and merged.

A unit is one kv head of one sequence; its query heads share every row that is read. Zones merge by
log-sum-exp in float32 (RetroInfer, arXiv 2505.02922): an estimated cluster of size s, logit l and value sum
V adds s·e^l to the denominator and V·e^l to the numerator. With a spread r², l gains ½ |scale·q|² r² / d.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtune.kernels.tiles import ROWS, padded


@dataclass
class Split:
    """How a zone is split: rows of a tile, warps, tiles in flight, and about how many programs to aim for."""

    tile: int
    warps: int
    stages: int
    programs: int


EXACT = Split(tile=64, warps=4, stages=3, programs=768)
ESTIMATED = Split(tile=128, warps=4, stages=1, programs=384)


@dataclass
class Rows:
    """Which tokens are attended exactly: rows of a unit's keys and values.

    resident [U, 4] int32: (first, sink, start, stop): rows first…first+sink-1 and start…stop-1
    listed [U, S] int32 further rows, the first ``n_listed`` [U] of them
    longest: bound on the resident rows of a unit
    """

    resident: Tensor
    listed: Tensor
    n_listed: Tensor
    longest: int


@dataclass
class Estimate:
    """Which clusters are attended by their estimate.

    logits [U, G, C] float32, sizes [U, C] int32, value_sums [U, C, dv]; the first ``n`` [U] of
    ``clusters`` [U, E] int32. ``spreads`` [U, C] float32, where logits are corrected for them.
    """

    logits: Tensor
    sizes: Tensor
    value_sums: Tensor
    clusters: Tensor
    n: Tensor
    spreads: Tensor | None = None


class SparseAttention:
    """Buffers for steps of U units with G query heads over at most ``exact`` rows and ``estimated`` clusters.

    ``usual_exact`` rows, where given, decide how the work is split; ``exact`` bounds it.
    """

    def __init__(
        self,
        units: int,
        group: int,
        value_dim: int,
        exact: int,
        estimated: int,
        device: torch.device | str,
        usual_exact: int | None = None,
    ) -> None:
        self.exact_chunk = _chunk(usual_exact or exact, units, EXACT)
        self.estimated_chunk = _chunk(estimated, units, ESTIMATED)
        self.n_exact = max(1, triton.cdiv(exact, self.exact_chunk))
        self.n_estimated = triton.cdiv(estimated, self.estimated_chunk)
        parts = self.n_exact + self.n_estimated
        self.side = side_stream(device)
        self._forked = False
        self.sums = torch.zeros(units, parts, group, value_dim, dtype=torch.float32, device=device)
        self.peaks = torch.zeros(2, units, parts, group, dtype=torch.float32, device=device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched inside runs beside what follows, until the next use of this object.

        It starts after what was launched so far (on a GPU, on a second stream).
        """
        if self.side is None:
            yield
            return
        self._join()
        self.side.wait_stream(torch.cuda.current_stream())
        self._forked = True
        with torch.cuda.stream(self.side):
            yield

    def _join(self) -> None:
        """Let what follows wait for what runs beside."""
        if self.side is not None and self._forked:
            torch.cuda.current_stream().wait_stream(self.side)
            self._forked = False

    def estimate(self, zone: Estimate, queries: Tensor, scaling: float) -> None:
        """Attend the clusters of ``zone`` by queries [U, G, d]; the next call merges them in."""
        units, group, dim = queries.shape
        width = zone.value_sums.shape[2]
        spreads = zone.spreads
        _estimate_kernel[(self.n_estimated, units)](
            zone.logits, zone.sizes, zone.value_sums, zone.clusters, zone.n, queries,
            queries if spreads is None else spreads, self.sums, self.peaks,
            zone.sizes.shape[1], zone.clusters.shape[1], zone.value_sums.stride(0),
            units, self.sums.shape[1], self.n_exact, self.estimated_chunk, dim, width, group, scaling,
            DIM=padded(dim), WIDTH=padded(width), GROUP=ROWS, TILE=ESTIMATED.tile, SPREAD=spreads is not None,
            num_warps=ESTIMATED.warps, num_stages=ESTIMATED.stages,
        )  # fmt: skip

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
        out: Tensor,
        scaling: float,
        n_estimated: Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        """Fill ``out`` [U, G, dv] for queries [U, G, d] over keys [U, N, d], values [U, N, dv].

        The rows of a unit need not be contiguous with the next unit's, but within a unit they are.
        ``n_estimated`` [U]: how many clusters :meth:`estimate` attended, to be merged in (``None``: none).
        """
        units, group, dim = queries.shape
        width, parts = values.shape[2], self.sums.shape[1]
        if n_estimated is None:
            self._join()  # beside an estimate, exact rows are attended at the same time
        _exact_kernel[(self.n_exact, units)](
            queries, keys, values, rows.resident, rows.listed, rows.n_listed, self.sums, self.peaks,
            keys.stride(0), values.stride(0), rows.listed.stride(0), units, parts, self.exact_chunk,
            dim, width, group, scaling, softcap or 0.0,
            DIM=padded(dim), WIDTH=padded(width), GROUP=ROWS, TILE=EXACT.tile, SOFTCAP=softcap is not None,
            num_warps=EXACT.warps, num_stages=EXACT.stages,
        )  # fmt: skip
        self._join()
        _merge_kernel[(units, group)](
            self.sums, self.peaks, rows.resident, rows.n_listed,
            rows.n_listed if n_estimated is None else n_estimated, out,
            units, parts, self.n_exact, self.exact_chunk, self.estimated_chunk, width, group,
            PARTS=min(32, triton.next_power_of_2(parts)), WIDTH=padded(width),
            ESTIMATE=n_estimated is not None, num_warps=4,
        )  # fmt: skip


@cache
def _side_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def side_stream(device: torch.device | str, number: int = 0) -> torch.cuda.Stream | None:
    """The ``number``-th stream for what runs beside a step, the same for all layers; ``None`` without a GPU.

    Of the pool of high priority: streams of the usual pool are handed out in turn, and one of them may be
    the stream that a graph is captured on.
    """
    place = torch.device(device)
    return _side_stream(place, number) if place.type == "cuda" else None


def _chunk(length: int, units: int, split: Split) -> int:
    """Rows of one program: whole tiles, so many that about ``split.programs`` share the work."""
    return split.tile * min(max(1, triton.cdiv(max(length, 1) * units, split.programs * split.tile)), 32)


@triton.jit
def _softmax_step(scores, peak, total, sums):
    """Fold scores [ROWS, TILE] in: returns weights and the rescaled running peak, total and sums."""
    new = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    scale = tl.exp(peak - base)
    weights = tl.exp(scores - base[:, None])
    return weights, new, total * scale, sums * scale[:, None]


@triton.jit
def _write_part(
    part_sums, part_peaks, peak, total, sums, at, count, width, group,
    GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program's peak, total and weighted sum; ``at`` numbers the part, ``count`` all parts."""
    head, columns = tl.arange(0, GROUP), tl.arange(0, WIDTH)
    real = head < group
    row = at * group + head
    tl.store(part_peaks + row, peak, mask=real)
    tl.store(part_peaks + count * group + row, total, mask=real)
    wanted = real[:, None] & (columns < width)[None, :]
    tl.store(part_sums + row[:, None] * width + columns[None, :], sums, mask=wanted)


@triton.jit
def _exact_kernel(
    queries, keys, values, resident, listed, n_listed, part_sums, part_peaks,
    key_stride, value_stride, list_stride, units, parts, chunk, dim, width, group, scaling, softcap,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    part, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sink_row, sink = tl.load(resident + unit * 4), tl.load(resident + unit * 4 + 1)
    start = tl.load(resident + unit * 4 + 2)
    n_resident = sink + tl.load(resident + unit * 4 + 3) - start
    count = n_resident + tl.load(n_listed + unit)
    first = part * chunk
    if first < count:
        head, channel, columns = tl.arange(0, GROUP), tl.arange(0, DIM), tl.arange(0, WIDTH)
        peak = tl.full([GROUP], float("-inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        sums = tl.zeros([GROUP, WIDTH], tl.float32)
        query = tl.load(
            queries + (unit * group + head[:, None]) * dim + channel[None, :],
            mask=(head < group)[:, None] & (channel < dim)[None, :],
            other=0.0,
        )
        for at in range(first, tl.minimum(first + chunk, count), TILE):
            slot = at + tl.arange(0, TILE)
            row = tl.where(slot < sink, sink_row + slot, start + slot - sink)
            beyond = (slot >= n_resident) & (slot < count)
            found = tl.load(listed + unit * list_stride + slot - n_resident, mask=beyond, other=0)
            row = tl.where(slot < n_resident, row, found).to(tl.int64)
            inside = slot < count
            key = tl.load(
                keys + unit * key_stride + row[:, None] * dim + channel[None, :],
                mask=inside[:, None] & (channel < dim)[None, :],
                other=0.0,
            )
            value = tl.load(
                values + unit * value_stride + row[:, None] * width + columns[None, :],
                mask=inside[:, None] & (columns < width)[None, :],
                other=0.0,
            )
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
            if SOFTCAP:
                scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
            scores = tl.where(inside[None, :], scores, float("-inf"))
            weights, peak, total, sums = _softmax_step(scores, peak, total, sums)
            total += tl.sum(weights, 1)
            sums = tl.dot(weights.to(value.dtype), value, sums, input_precision="ieee")
        _write_part(
            part_sums, part_peaks, peak, total, sums, unit * parts + part, units * parts, width, group,
            GROUP, WIDTH,
        )  # fmt: skip


@triton.jit
def _estimate_kernel(
    logits, sizes, value_sums, clusters, n_clusters, queries, spreads, part_sums, part_peaks,
    n_sizes, n_chosen, sum_stride, units, parts, first_part, chunk, dim, width, group, scaling,
    DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    part, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(n_clusters + unit)
    first = part * chunk
    if first < count:
        head, columns = tl.arange(0, GROUP), tl.arange(0, WIDTH)
        peak = tl.full([GROUP], float("-inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        sums = tl.zeros([GROUP, WIDTH], tl.float32)
        if SPREAD:
            channel = tl.arange(0, DIM)
            query = tl.load(
                queries + (unit * group + head[:, None]) * dim + channel[None, :],
                mask=(head < group)[:, None] & (channel < dim)[None, :],
                other=0.0,
            ).to(tl.float32)
            gain = tl.sum(query * query, 1) * (0.5 * scaling * scaling / dim)
        for at in range(first, tl.minimum(first + chunk, count), TILE):
            slot = at + tl.arange(0, TILE)
            inside = slot < count
            cluster = tl.load(clusters + unit * n_chosen + slot, mask=inside, other=0).to(tl.int64)
            size = tl.load(sizes + unit * n_sizes + cluster, mask=inside, other=1).to(tl.float32)
            value = tl.load(
                value_sums + unit * sum_stride + cluster[:, None] * width + columns[None, :],
                mask=inside[:, None] & (columns < width)[None, :],
                other=0.0,
            )
            scores = tl.load(
                logits + (unit * group + head[:, None]) * n_sizes + cluster[None, :],
                mask=(head < group)[:, None] & inside[None, :],
                other=float("-inf"),
            )
            scores += tl.log(size)[None, :]
            if SPREAD:
                spread = tl.load(spreads + unit * n_sizes + cluster, mask=inside, other=0.0)
                scores += gain[:, None] * spread[None, :]
            weights, peak, total, sums = _softmax_step(scores, peak, total, sums)
            total += tl.sum(weights, 1)
            weights = weights / size[None, :]
            sums = tl.dot(weights.to(value.dtype), value, sums, input_precision="ieee")
        _write_part(
            part_sums, part_peaks, peak, total, sums, unit * parts + first_part + part, units * parts, width,
            group, GROUP, WIDTH,
        )  # fmt: skip


@triton.jit
def _merge_kernel(
    part_sums, part_peaks, resident, n_listed, n_clusters, out,
    units, parts, n_exact, exact_chunk, estimated_chunk, width, group,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, ESTIMATE: tl.constexpr,
):  # fmt: skip
    unit, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    count = tl.load(resident + unit * 4 + 1) + tl.load(resident + unit * 4 + 3) + tl.load(n_listed + unit)
    count -= tl.load(resident + unit * 4 + 2)
    exact = (count + exact_chunk - 1) // exact_chunk
    estimated = 0
    if ESTIMATE:
        estimated = (tl.load(n_clusters + unit) + estimated_chunk - 1) // estimated_chunk
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    merged = tl.zeros([WIDTH], tl.float32)
    for first in range(0, exact + estimated, PARTS):  # parts that had something to do, exact ones first
        number = first + tl.arange(0, PARTS)
        used = number < exact + estimated
        part = tl.where(number < exact, number, n_exact + number - exact)
        at = (unit * parts + part) * group + head
        peak = tl.load(part_peaks + at, mask=used, other=float("-inf"))
        mass = tl.load(part_peaks + units * parts * group + at, mask=used, other=0.0)
        sums = tl.load(
            part_sums + at[:, None] * width + columns[None, :],
            mask=used[:, None] & (columns < width)[None, :],
            other=0.0,
        )
        new = tl.maximum(top, tl.max(peak, 0))
        weight, scale = tl.exp(peak - new), tl.exp(top - new)
        total = total * scale + tl.sum(mass * weight, 0)
        merged = merged * scale + tl.sum(sums * weight[:, None], 0)
        top = new
    merged = (merged / total).to(out.dtype.element_ty)
    tl.store(out + (unit * group + head) * width + columns, merged, mask=columns < width)
