"""Choosing blocks: the best ``nprobe`` of a unit in rank order, and the next ``es`` in any order.

Four launches over many programs a unit. Blocks are counted into 4,096 bins of the order of
their ranks; the bins where the two thresholds lie part the blocks
into those surely taken, those surely not, and a few to compare one by one. Exact; ties go to the lowest
block, as in the policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PLAN = 4
"""Columns of a plan: visible blocks, blocks to retrieve, blocks to estimate, pages of execution buffer."""

SHARE, BEST = 0, 1
"""How a group ranks a block: the sum of its softmax shares (wave index), or its highest score (Quest)."""

_BINS = tl.constexpr(4096)
_SIDE = tl.constexpr(64)  # squared: bins
_TILE, _COMPARERS = 1024, 12


@dataclass
class Choice:
    """Buffers of one layer's choice among at most C blocks; U units.

    retrieved [U, R] int32: blocks in rank order, -1 as padding; starts [U, R] int32: where each block's
    tokens begin in the list of retrieved tokens; n_tokens [U] int32: its length
    estimated [U, E] int32: blocks in any order, n_estimated [U] int32 of them
    truncated [U] int32: blocks dropped because the execution buffer was full

    Scratch: keys and bins [U, C], histogram [U, 4096] and counts [U, 3] (zero between steps), limits [U, 2],
    pending [U, 2, 2, C] (at either threshold, blocks to compare and their keys), ranks [U, R].
    """

    retrieved: Tensor
    starts: Tensor
    n_tokens: Tensor
    estimated: Tensor
    n_estimated: Tensor
    truncated: Tensor
    keys: Tensor
    bins: Tensor
    histogram: Tensor
    counts: Tensor
    limits: Tensor
    pending: Tensor
    ranks: Tensor

    @classmethod
    def empty(
        cls, units: int, blocks: int, retrieved: int, estimated: int, device: torch.device | str
    ) -> Choice:
        """Buffers for at most ``retrieved`` and ``estimated`` of ``blocks`` a unit."""

        def new(*shape: int) -> Tensor:
            return torch.zeros(units, *shape, dtype=torch.int32, device=device)

        blocks, wide = max(blocks, 1), max(retrieved, 1)
        return cls(
            retrieved=new(wide) - 1,
            starts=new(wide),
            n_tokens=new(),
            estimated=new(max(estimated, 1)),
            n_estimated=new(),
            truncated=new(),
            keys=new(blocks),
            bins=new(blocks),
            histogram=new(_BINS.value),
            counts=new(3),
            limits=new(2),
            pending=new(2, 2, blocks),
            ranks=new(wide),
        )


def choose(
    logits: Tensor, stats: Tensor, sizes: Tensor, plan: Tensor, choice: Choice, how: int = SHARE
) -> None:
    """Choose from logits [U, G, C] with their ``stats`` (see ``scan``), sizes [U, C] and plan [U, 4].

    Sizes (tokens) and plan are int32. An empty block is never chosen, but its logit stays in the softmax, as
    in RetroInfer. Afterwards ``choice.estimated`` and its count are filled; :func:`cut` does the rest.
    """
    units, group, width = logits.shape
    parts = stats.shape[2]
    grid = (triton.cdiv(width, _TILE), units)
    _rank_kernel[grid](
        logits, stats, sizes, plan, choice.keys, choice.bins, choice.histogram, width, parts, units, group,
        HEADS=triton.next_power_of_2(group), PARTS=triton.next_power_of_2(parts), TILE=_TILE, HOW=how,
        num_warps=8,
    )  # fmt: skip
    n_retrieved, n_estimated = choice.retrieved.shape[1], choice.estimated.shape[1]
    _part_kernel[grid](
        choice.keys, choice.bins, plan, choice.histogram, choice.counts, choice.limits, choice.pending,
        choice.estimated,
        width, n_retrieved, n_estimated, TILE=_TILE, num_warps=8,
    )  # fmt: skip
    _compare_kernel[(2 * _COMPARERS, units)](
        choice.counts, choice.limits, choice.pending, choice.ranks, choice.estimated,
        choice.n_estimated, width, n_retrieved, n_estimated, MINE=32, THEIRS=256, num_warps=4,
    )  # fmt: skip


def cut(
    choice: Choice,
    sizes: Tensor,
    plan: Tensor,
    offsets: Tensor | None = None,
    rows: Tensor | None = None,
    longest: int = 32,
) -> None:
    """Finish a choice: keep retrieved blocks in rank order while their pages of 8 tokens fit the plan's.

    Where given, ``rows`` [U, S] int32 gets their tokens, block by block: block c is the ``sizes[c]`` rows
    from ``offsets[c]`` on, offsets [U, C or more] int32. ``longest``: a usual block's tokens, for
    tiling only.
    """
    units, width = choice.retrieved.shape
    block = 16
    list_rows = rows is not None and offsets is not None
    other = choice.retrieved
    _cut_kernel[(triton.cdiv(width, block), units)](
        sizes, plan, choice.histogram, choice.counts, choice.limits, choice.ranks,
        other if offsets is None else offsets, other if rows is None else rows,
        choice.retrieved, choice.starts, choice.n_tokens, choice.truncated,
        sizes.shape[1], width,
        0 if offsets is None else offsets.shape[1], 0 if rows is None else rows.stride(0),
        RETRIEVED=max(16, triton.next_power_of_2(width)), BLOCK=block,
        RUN=max(16, triton.next_power_of_2(longest)), LIST=list_rows, num_warps=4,
    )  # fmt: skip


@triton.jit
def _key(score):
    """A float32 as an unsigned integer of the same order, never 0 for a number."""
    bits = score.to(tl.int32, bitcast=True)
    turned = tl.where(bits < 0, ~bits, bits | -2147483648)
    return turned.to(tl.uint32, bitcast=True)


@triton.jit
def _place(key, rank, top, HOW: tl.constexpr):
    """The bin 1…4095 of each block, of the same order as the keys: fine where thresholds are likely to lie.

    Shares: 128 bins an octave, from 2^4 down to 2^-28. Scores: 64 bins a unit below the best, ``top``.
    """
    if HOW == 1:
        place = 4095 - tl.minimum((top - rank) * 64, 4094.0).to(tl.int32)
    else:
        place = (key >> 16).to(tl.int32) - (0xC180 - 4095)
    return tl.minimum(tl.maximum(place, 1), 4095)


@triton.jit
def _rank_kernel(
    logits, stats, sizes, plan, keys, bins, histogram, width, parts, units, group,
    HEADS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """The group's rank of each block as a key (0 where it cannot be chosen), and the count of each bin."""
    unit = tl.program_id(1).to(tl.int64)
    visible = tl.load(plan + unit * 4)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE < visible:
        seen = column < visible
        usable = tl.load(sizes + unit * width + column, mask=seen, other=0) > 0
        head, part = tl.arange(0, HEADS)[:, None], tl.arange(0, PARTS)[None, :]
        at = (unit * parts + part) * group + head
        known = (head < group) & (part < parts)
        peaks = tl.load(stats + at, mask=known, other=float("-inf"))
        sums = tl.load(stats + units * parts * group + at, mask=known, other=0.0)
        row = tl.load(
            logits + (unit * group + head) * width + column[None, :],
            mask=(head < group) & seen[None, :],
            other=float("-inf"),
        )
        tops = tl.max(peaks, 1)
        best = tl.max(tops, 0)
        if HOW == 1:
            rank = tl.max(row, 0)
        else:
            finite = tl.where(tops == float("-inf"), 0.0, tops)[:, None]  # padding
            whole = tl.sum(sums * tl.exp(peaks - finite), 1)
            share = tl.exp(row - finite) / tl.where(whole == 0, 1.0, whole)[:, None]
            rank = tl.sum(share, 0)
        key = tl.where(usable, _key(rank), 0)
        tl.store(keys + unit * width + column, key.to(tl.int32, bitcast=True), mask=seen)
        place = _place(key, rank, best, HOW)
        tl.store(bins + unit * width + column, tl.where(usable, place, 0), mask=seen)
        tl.atomic_add(histogram + unit * _BINS + place, 1, mask=usable, sem="relaxed")


@triton.jit
def _bins_of(histogram, lines, wanted):
    """The highest bins at or above which there are ``wanted`` [2] blocks; ``lines``: sums of 64 bins."""
    index = tl.arange(0, _SIDE)[None, :]
    above = (tl.sum(lines, 0) - tl.cumsum(lines, 0) + lines)[None, :]
    line = tl.sum((above >= wanted[:, None]).to(tl.int32), 1) - 1
    higher = tl.sum(tl.where(index > line[:, None], lines[None, :], 0), 1)
    bins = tl.load(histogram + line[:, None] * _SIDE + index)
    above = higher[:, None] + tl.sum(bins, 1)[:, None] - tl.cumsum(bins, 1) + bins
    return line * _SIDE + tl.sum((above >= wanted[:, None]).to(tl.int32), 1) - 1


@triton.jit
def _part_kernel(
    keys, bins, plan, histogram, counts, limits, pending, estimated, width, n_retrieved, n_estimated,
    TILE: tl.constexpr,
):  # fmt: skip
    """Part the blocks: at or above the first threshold's bin, surely estimated, in the second one's bin."""
    unit = tl.program_id(1).to(tl.int64)
    visible = tl.load(plan + unit * 4)
    if tl.program_id(0) * TILE < tl.maximum(visible, 1):  # the first also says that there are none
        side = tl.arange(0, _SIDE)
        mine = histogram + unit * _BINS
        lines = tl.sum(tl.load(mine + side[:, None] * _SIDE + side[None, :]), 1)
        total = tl.sum(lines, 0)
        first = tl.minimum(tl.minimum(tl.load(plan + unit * 4 + 1), total), n_retrieved)
        both = tl.minimum(first + tl.minimum(tl.load(plan + unit * 4 + 2), n_estimated), total)
        which = tl.arange(0, 2)
        found = _bins_of(mine, lines, tl.where(which == 0, first, both))
        upper = tl.sum(tl.where(which == 0, found, 0), 0)
        lower = tl.sum(tl.where(which == 1, found, 0), 0)
        column = tl.program_id(0) * TILE + tl.arange(0, TILE)
        key = tl.load(keys + unit * width + column, mask=column < visible, other=0)
        place = tl.load(bins + unit * width + column, mask=column < visible, other=0)
        usable = place > 0
        is_near = usable & (place >= upper)
        is_estimated = usable & (place < upper) & (place > lower)
        is_rest = usable & (place < upper) & (place == lower)
        packed = is_near.to(tl.int64) + (is_estimated.to(tl.int64) << 20) + (is_rest.to(tl.int64) << 40)
        before, sums = tl.cumsum(packed, 0) - packed, tl.sum(packed, 0)
        tally = counts + unit * 3
        first_near = tl.atomic_add(tally, (sums & 0xFFFFF).to(tl.int32))
        first_estimated = tl.atomic_add(tally + 1, ((sums >> 20) & 0xFFFFF).to(tl.int32))
        first_rest = tl.atomic_add(tally + 2, (sums >> 40).to(tl.int32))
        at = first_near + (before & 0xFFFFF)
        tl.store(pending + unit * 4 * width + at, column, mask=is_near)
        tl.store(pending + (unit * 4 + 1) * width + at, key, mask=is_near)
        at = first_estimated + ((before >> 20) & 0xFFFFF)
        tl.store(estimated + unit * n_estimated + at, column, mask=is_estimated)
        at = first_rest + (before >> 40)
        tl.store(pending + (unit * 4 + 2) * width + at, column, mask=is_rest)
        tl.store(pending + (unit * 4 + 3) * width + at, key, mask=is_rest)
        if tl.program_id(0) == 0:
            tl.store(limits + unit * 2, first)
            tl.store(limits + unit * 2 + 1, both)


@triton.jit
def _rank_of(blocks, keys, count, block, key, MINE: tl.constexpr, THEIRS: tl.constexpr):
    """How many of ``count`` blocks beat each of ``block`` [MINE]: by a higher key, or the same and lower."""
    rank = tl.zeros([MINE], tl.int32)
    for j in range(0, count, THEIRS):
        theirs = j + tl.arange(0, THEIRS)
        other_key = tl.load(keys + theirs, mask=theirs < count, other=0).to(tl.uint32, bitcast=True)
        other = tl.load(blocks + theirs, mask=theirs < count, other=0)
        beats = other_key[None, :] > key[:, None]
        beats = beats | ((other_key[None, :] == key[:, None]) & (other[None, :] < block[:, None]))
        rank += tl.sum((beats & (theirs < count)[None, :]).to(tl.int32), 1)
    return rank


@triton.jit
def _compare_kernel(
    counts, limits, pending, ranks, estimated, n_estimated, width, n_retrieved, n_est,
    MINE: tl.constexpr, THEIRS: tl.constexpr,
):  # fmt: skip
    """Rank what is left to compare: the retrieved in order, and those that are estimated after all.

    Half of the programs take what lies near the first threshold, half what lies near the second.
    """
    unit, half = tl.program_id(1).to(tl.int64), tl.num_programs(0) // 2
    n_near, n_sure = tl.load(counts + unit * 3), tl.load(counts + unit * 3 + 1)
    n_rest = tl.load(counts + unit * 3 + 2)
    first, both = tl.load(limits + unit * 2), tl.load(limits + unit * 2 + 1)
    if tl.program_id(0) == 0:
        tl.store(n_estimated + unit, both - first)
    late = tl.program_id(0) >= half
    lists = pending + (unit * 2 + late.to(tl.int32)) * 2 * width
    count = tl.where(late, n_rest, n_near)
    known = n_sure + tl.minimum(n_near, both) - first
    for i in range((tl.program_id(0) % half) * MINE, count, half * MINE):
        mine = i + tl.arange(0, MINE)
        real = mine < count
        block = tl.load(lists + mine, mask=real, other=0)
        key = tl.load(lists + width + mine, mask=real, other=0).to(tl.uint32, bitcast=True)
        rank = _rank_of(lists, lists + width, count, block, key, MINE, THEIRS)
        if late:
            wanted = real & (rank < both - first - known)
            tl.store(estimated + unit * n_est + known + rank, block, mask=wanted)
        else:
            tl.store(ranks + unit * n_retrieved + rank, block, mask=real & (rank < first))
            wanted = real & (rank >= first) & (rank < both)
            tl.store(estimated + unit * n_est + n_sure + rank - first, block, mask=wanted)


@triton.jit
def _cut_kernel(
    sizes, plan, histogram, counts, limits, ranks, offsets, rows, retrieved, starts, n_tokens, truncated,
    width, n_retrieved, n_offsets, row_stride,
    RETRIEVED: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Cut the retrieved blocks to the execution buffer and list their tokens; clear the scratch."""
    unit = tl.program_id(1).to(tl.int64)
    first = tl.load(limits + unit * 2)
    rank = tl.arange(0, RETRIEVED)
    held = rank < first
    block = tl.load(ranks + unit * n_retrieved + rank, mask=held, other=0)
    tokens = tl.load(sizes + unit * width + block, mask=held, other=0)
    fits = held & (tl.cumsum((tokens + 7) // 8, 0) <= tl.load(plan + unit * 4 + 3))
    tokens = tl.where(fits, tokens, 0)
    start = tl.cumsum(tokens, 0) - tokens
    mine = (rank >= tl.program_id(0) * BLOCK) & (rank < (tl.program_id(0) + 1) * BLOCK)
    written = mine & (rank < n_retrieved)
    tl.store(retrieved + unit * n_retrieved + rank, tl.where(fits, block, -1), mask=written)
    tl.store(starts + unit * n_retrieved + rank, start, mask=written)
    if tl.program_id(0) == 0:
        tl.store(n_tokens + unit, tl.sum(tokens, 0))
        tl.store(truncated + unit, first - tl.sum(fits.to(tl.int32), 0))
        bins = tl.arange(0, _BINS)
        tl.store(histogram + unit * _BINS + bins, tl.zeros([_BINS], tl.int32))
        count = tl.arange(0, 4)
        tl.store(counts + unit * 3 + count, tl.zeros([4], tl.int32), mask=count < 3)
    if LIST:
        tl.debug_barrier()  # the program's own part of retrieved and starts is read again, a block a row
        _list_rows(
            retrieved + unit * n_retrieved, starts + unit * n_retrieved, sizes + unit * width,
            offsets + unit * n_offsets, rows + unit * row_stride, n_retrieved, BLOCK, RUN,
        )  # fmt: skip


@triton.jit
def _list_rows(retrieved, starts, sizes, offsets, rows, width, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """Write the rows of ``BLOCK`` blocks, each a run of consecutive rows."""
    rank = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(retrieved + rank, mask=rank < width, other=-1)
    held = block >= 0
    start = tl.load(starts + rank, mask=held, other=0)
    size = tl.load(sizes + block, mask=held, other=0)
    offset = tl.load(offsets + block, mask=held, other=0)
    for run in range(0, tl.max(size, 0), RUN):
        inside = run + tl.arange(0, RUN)
        wanted = inside[None, :] < size[:, None]
        tl.store(rows + start[:, None] + inside[None, :], offset[:, None] + inside[None, :], mask=wanted)
