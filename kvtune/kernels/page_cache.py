"""The wave buffer of a layer's units on the device: one program looks up, and one updates, a unit.

The logical order is RetroInfer's (arXiv 2505.02922; ``runtime.block_cache`` tells it one block at a time).
A missed cluster is fetched straight into free slots of the pool. Admitting it only leaves its pages there;
evicting one only gives its slots back, so an update moves no data.

Lanes of a program tell each other things through device memory, always with a barrier between the write
and the read, and between a read and a write of one place: threads that a small tensor leaves over repeat
its reads. Ragged pages are laid out by search: page k of a list belongs to the entry whose inclusive page
sum is the first above k.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Pages, or resident clusters, that a program works on at a time."""

_HIT = tl.constexpr(-0x40000000)
_NEVER = tl.constexpr(0x7FFFFFFF)


@dataclass
class PageState:
    """What a cache remembers; int32 but for the counters, U units of one layer, all sizes maxima.

    page_offsets   [U, C + 1]   pages before each cluster
    page_slot      [U, pages]   slot of each page, -1 where absent
    free, n_free   [U, P], [U]  stack of free slots
    order          [U, L]       resident clusters from least to most recent
    n_resident     [U]          length of ``order``
    used           [U]          pages of the resident clusters
    seen, step     [U, C], [U]  the last step that hit a cluster; steps so far
    counters       [U, 3, 2]    int64: of requests, pages and tokens, those found and those asked for
    plan           [U, 6, R']   scratch of the lookup
    gone           [U, 2, L+R'] scratch of the update
    """

    capacity: int
    buffer_pages: int
    page_offsets: Tensor
    page_slot: Tensor
    free: Tensor
    n_free: Tensor
    order: Tensor
    n_resident: Tensor
    used: Tensor
    seen: Tensor
    step: Tensor
    counters: Tensor
    plan: Tensor
    gone: Tensor


@dataclass
class Lookup:
    """What one step found; int32 unless said otherwise. F = buffer pages, S = 8 · F.

    retrieved                [U, R]  the clusters asked for, in rank order (the caller's own tensor)
    hits                     [U, R]  int8, 1 where the cluster was resident
    n_kept                   [U]     ranks that fit the execution buffer; 0 after the update
    fetch_rows               [U, F]  host row where each missing page starts
    fetch_slots              [U, F]  slot that it goes to
    fetch_counts             [U, F]  its rows, 1 … 8
    n_fetch                  [U]     missing pages; what lies beyond them in the lists has no meaning
    rows                     [U, S]  pool row of every token of every cluster in rank order, then -1
    n_rows                   [U]     tokens of the clusters
    """

    retrieved: Tensor
    hits: Tensor
    n_kept: Tensor
    fetch_rows: Tensor
    fetch_slots: Tensor
    fetch_counts: Tensor
    n_fetch: Tensor
    rows: Tensor
    n_rows: Tensor


def look_up(state: PageState, offsets: Tensor, found: Lookup) -> None:
    """Fill ``found`` for its ``retrieved`` clusters [U, R] and give the missing pages slots.

    offsets [U, ≥ C + 1], any integer type: first host row of each cluster, and where the last one ends.
    """
    units, n_ranks = found.retrieved.shape
    ranks = state.plan.shape[2]
    _lookup_kernel[(units,)](
        found.retrieved, offsets, state.page_offsets, state.page_slot, state.free, state.n_free,
        state.counters, state.plan, found.hits, found.n_kept, found.fetch_rows, found.fetch_slots,
        found.fetch_counts, found.n_fetch, found.rows, found.n_rows,
        n_ranks, state.buffer_pages, found.retrieved.stride(0), offsets.stride(0),
        state.page_offsets.stride(0), state.page_slot.stride(0), state.free.stride(0),
        RANKS=ranks, SEARCH=(ranks - 1).bit_length(), PAGES=_block(state.buffer_pages), num_warps=8,
    )  # fmt: skip


def update(state: PageState, found: Lookup) -> None:
    """Promote, admit and evict after the step of ``found``; free the slots of what is not kept."""
    units, n_ranks = found.retrieved.shape
    ranks, listed = state.plan.shape[2], state.gone.shape[2]
    _update_kernel[(units,)](
        found.retrieved, found.hits, found.n_kept, state.page_offsets, state.page_slot, state.free,
        state.n_free, state.order, state.n_resident, state.used, state.seen, state.step, state.gone,
        n_ranks, state.capacity, listed, found.retrieved.stride(0), state.page_offsets.stride(0),
        state.page_slot.stride(0), state.free.stride(0), state.seen.stride(0),
        RANKS=ranks, SEARCH=(listed - 1).bit_length(), RESIDENTS=_block(state.capacity),
        PAGES=_block(state.buffer_pages), num_warps=8,
    )  # fmt: skip


def _block(items: int) -> int:
    return min(triton.next_power_of_2(items), BLOCK)


@triton.jit
def _entry_of(page, ends, n_entries, SEARCH: tl.constexpr):
    """How many of the ascending ends[0 … n_entries-1] are ≤ page, by bisection: at most 2^SEARCH - 1."""
    passed = tl.zeros_like(page)
    for bit in tl.static_range(SEARCH):
        ahead = passed + (1 << (SEARCH - 1 - bit))
        end = tl.load(ends + ahead - 1, mask=ahead <= n_entries, other=_NEVER)
        passed = tl.where(end <= page, ahead, passed)
    return passed


@triton.jit
def _counts(lane, hit, kept, pages, tokens):
    """What a step adds to counters [3, 2], one a lane."""
    amount = tl.where(lane == 0, tl.sum(hit.to(tl.int32), 0), tl.sum(kept.to(tl.int32), 0))
    amount = tl.where(lane == 2, tl.sum(tl.where(hit, pages, 0), 0), amount)
    amount = tl.where(lane == 3, tl.sum(pages, 0), amount)
    amount = tl.where(lane == 4, tl.sum(tl.where(hit, tokens, 0), 0), amount)
    return tl.where(lane == 5, tl.sum(tokens, 0), amount)


@triton.jit
def _lookup_kernel(
    retrieved, offsets, page_offsets, page_slot, free, n_free, counters, plan,
    hits, n_kept, fetch_rows, fetch_slots, fetch_counts, n_fetch, rows, n_rows,
    n_ranks, buffer, retrieved_stride, offsets_stride, clusters_stride, pages_stride, slots_stride,
    RANKS: tl.constexpr, SEARCH: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    cluster = tl.load(retrieved + unit * retrieved_stride + rank, mask=rank < n_ranks, other=-1)
    present = cluster >= 0
    before = page_offsets + unit * clusters_stride + cluster
    first_page = tl.load(before, mask=present, other=0)
    pages = tl.load(before + 1, mask=present, other=0) - first_page
    kept = present & (tl.cumsum(pages, 0) <= buffer)
    pages = tl.where(kept, pages, 0)
    host = offsets + unit * offsets_stride + cluster
    first_row = tl.load(host, mask=kept, other=0).to(tl.int32)
    tokens = tl.load(host + 1, mask=kept, other=0).to(tl.int32) - first_row
    slot_of = page_slot + unit * pages_stride
    hit = tl.load(slot_of + first_page, mask=pages > 0, other=-1) >= 0
    top = tl.load(n_free + unit)
    tl.store(hits + unit * n_ranks + rank, hit.to(tl.int8), mask=rank < n_ranks)
    lane = tl.arange(0, 8)
    counted = tl.load(counters + unit * 6 + lane, mask=lane < 6, other=0)
    counted += _counts(lane, hit, kept, pages, tokens)

    missing = tl.where(hit, 0, pages)
    n_missing, n_tokens, n_ranked = tl.sum(missing, 0), tl.sum(tokens, 0), tl.sum(kept.to(tl.int32), 0)
    # What turns k, the number of a page among all pages of the step, into what is wanted: one value a rank.
    ends = plan + unit * 6 * RANKS
    end = tl.cumsum(pages, 0)
    start = end - pages
    tl.store(ends + rank, end)
    tl.store(ends + RANKS + rank, first_page - start)
    tl.store(ends + 2 * RANKS + rank, tl.where(hit, _HIT, tl.cumsum(missing, 0) - missing - start))
    tl.store(ends + 3 * RANKS + rank, first_row - 8 * start)
    tl.store(ends + 4 * RANKS + rank, tl.cumsum(tokens, 0) - tokens - 8 * start)
    tl.store(ends + 5 * RANKS + rank, tokens + 8 * start)
    tl.debug_barrier()

    listed = unit * buffer
    _lay_out(
        ends, n_ranked, tl.sum(pages, 0), slot_of, free + unit * slots_stride + top - 1,
        fetch_rows + listed, fetch_slots + listed, fetch_counts + listed, rows + listed * 8,
        RANKS, SEARCH, PAGES,
    )  # fmt: skip
    for begin in tl.range(n_tokens, buffer * 8, PAGES * 8):
        beyond = begin + tl.arange(0, PAGES * 8)
        tl.store(rows + listed * 8 + beyond, -1, mask=beyond < buffer * 8)
    tl.store(counters + unit * 6 + lane, counted, mask=lane < 6)
    tl.store(n_free + unit, top - n_missing)
    tl.store(n_fetch + unit, n_missing)
    tl.store(n_rows + unit, n_tokens)
    tl.store(n_kept + unit, n_ranked)


@triton.jit
def _lay_out(
    ends, n_ranked, n_pages, slot_of, stack_top, fetch_rows, fetch_slots, fetch_counts, rows,
    RANKS: tl.constexpr, SEARCH: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Give the missing pages slots from the stack, list them, and list the rows of all pages."""
    for begin in tl.range(0, n_pages, PAGES):
        k = begin + tl.arange(0, PAGES)
        live = k < n_pages
        entry = ends + _entry_of(k, ends, n_ranked, SEARCH)
        page = k + tl.load(entry + RANKS, mask=live, other=0)
        miss = k + tl.load(entry + 2 * RANKS, mask=live, other=_HIT)
        row = 8 * k + tl.load(entry + 3 * RANKS, mask=live, other=0)
        token = 8 * k + tl.load(entry + 4 * RANKS, mask=live, other=0)
        count = tl.minimum(tl.load(entry + 5 * RANKS, mask=live, other=0) - 8 * k, 8)
        missing = live & (miss >= 0)
        held = tl.load(slot_of + page, mask=live & (miss < 0), other=0)
        slot = tl.where(missing, tl.load(stack_top - miss, mask=missing, other=0), held)
        tl.store(slot_of + page, slot, mask=missing)
        tl.store(fetch_rows + miss, row, mask=missing)
        tl.store(fetch_slots + miss, slot, mask=missing)
        tl.store(fetch_counts + miss, count, mask=missing)
        within = tl.arange(0, 8)[None, :]
        inside = live[:, None] & (within < count[:, None])
        tl.store(rows + token[:, None] + within, slot[:, None] * 8 + within, mask=inside)


@triton.jit
def _update_kernel(
    retrieved, hits, n_kept, page_offsets, page_slot, free, n_free,
    order, n_resident, used, seen, steps, gone,
    n_ranks, capacity, listed, retrieved_stride, clusters_stride, pages_stride, slots_stride, seen_stride,
    RANKS: tl.constexpr, SEARCH: tl.constexpr, RESIDENTS: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    kept = rank < tl.load(n_kept + unit)
    cluster = tl.load(retrieved + unit * retrieved_stride + rank, mask=kept, other=0)
    hit = tl.load(hits + unit * n_ranks + rank, mask=kept, other=0) != 0
    before = page_offsets + unit * clusters_stride
    first_page = tl.load(before + cluster, mask=kept, other=0)
    pages = tl.load(before + cluster + 1, mask=kept, other=0) - first_page
    residents, in_use, n_slots = tl.load(n_resident + unit), tl.load(used + unit), tl.load(n_free + unit)
    step = tl.load(steps + unit) + 1
    stamps = seen + unit * seen_stride
    tl.store(stamps + cluster, tl.zeros_like(cluster) + step, mask=hit)

    # Misses are admitted in rank order until their pages together exceed the capacity.
    missing = tl.where(hit, 0, pages)
    admitted = (missing > 0) & (tl.cumsum(missing, 0) <= capacity)
    needed = tl.sum(tl.where(admitted, pages, 0), 0)
    overflow = in_use + needed - capacity
    tl.debug_barrier()

    # From the oldest on: residents without a hit, then the hits in reverse rank order. What starts below
    # the overflow leaves.
    recency = order + unit * capacity
    ends = gone + unit * 2 * listed
    shifts = ends + listed
    n_pages, n_gone, n_stay, n_freed = _sift(
        recency, residents, before, stamps, step, overflow, ends, shifts, RESIDENTS
    )
    touched = tl.where(hit, pages, 0)
    start = n_pages + tl.sum(touched, 0) - tl.cumsum(touched, 0)
    leaves = hit & (start < overflow)
    among = n_gone + n_stay + tl.sum(hit.to(tl.int32), 0) - tl.cumsum(hit.to(tl.int32), 0)
    tl.store(ends + among, start + pages, mask=leaves)
    tl.store(shifts + among, first_page - start, mask=leaves)
    n_gone += tl.sum(leaves.to(tl.int32), 0)
    n_stay += tl.sum((hit & ~leaves).to(tl.int32), 0)
    n_freed += tl.sum(tl.where(leaves, pages, 0), 0)
    tl.store(recency + among - n_gone, cluster, mask=hit & ~leaves)
    # The newest: admitted misses in rank order. The other misses go with those that leave.
    tl.store(recency + n_stay + tl.cumsum(admitted.to(tl.int32), 0) - 1, cluster, mask=admitted)
    tl.store(n_resident + unit, n_stay + tl.sum(admitted.to(tl.int32), 0))
    tl.store(used + unit, in_use + needed - n_freed)
    refused = (missing > 0) & ~admitted
    end = n_freed + tl.cumsum(tl.where(refused, pages, 0), 0)
    among = n_gone + tl.cumsum(refused.to(tl.int32), 0) - 1
    tl.store(ends + among, end, mask=refused)
    tl.store(shifts + among, first_page - end + pages, mask=refused)
    n_gone += tl.sum(refused.to(tl.int32), 0)
    n_freed += tl.sum(tl.where(refused, pages, 0), 0)
    tl.debug_barrier()

    stack = free + unit * slots_stride + n_slots
    _release(ends, shifts, n_gone, n_freed, page_slot + unit * pages_stride, stack, SEARCH, PAGES)
    tl.store(n_free + unit, n_slots + n_freed)
    tl.store(steps + unit, step)
    tl.store(n_kept + unit, 0)


@triton.jit
def _sift(
    recency, residents, before, stamps, step, overflow, ends, shifts, RESIDENTS: tl.constexpr
):  # fmt: skip
    """List the residents without a hit that leave, and close the ranks of those that stay.

    Returns the pages of both, how many leave, how many stay, and the pages of those that leave.
    """
    n_pages, n_gone, n_stay, n_freed = 0, 0, 0, 0
    for begin in tl.range(0, residents, RESIDENTS):
        place = begin + tl.arange(0, RESIDENTS)
        cluster = tl.load(recency + place, mask=place < residents, other=0)
        idle = tl.load(stamps + cluster, mask=place < residents, other=step) != step
        first_page = tl.load(before + cluster, mask=idle, other=0)
        pages = tl.load(before + cluster + 1, mask=idle, other=0) - first_page
        start = n_pages + tl.cumsum(pages, 0) - pages
        leaves = idle & (start < overflow)
        among = n_gone + n_stay + tl.cumsum(idle.to(tl.int32), 0) - 1
        n_pages += tl.sum(pages, 0)
        n_gone += tl.sum(leaves.to(tl.int32), 0)
        n_stay += tl.sum((idle & ~leaves).to(tl.int32), 0)
        n_freed += tl.sum(tl.where(leaves, pages, 0), 0)
        tl.debug_barrier()  # all have read this block's places, which are written from here on
        tl.store(recency + among - n_gone, cluster, mask=idle & ~leaves)
        tl.store(ends + among, start + pages, mask=leaves)
        tl.store(shifts + among, first_page - start, mask=leaves)
    return n_pages, n_gone, n_stay, n_freed


@triton.jit
def _release(
    ends, shifts, n_entries, n_pages, slot_of, stack, SEARCH: tl.constexpr, PAGES: tl.constexpr
):  # fmt: skip
    """Put the slots of the listed clusters' pages on the stack, and forget where the pages were."""
    for begin in tl.range(0, n_pages, PAGES):
        k = begin + tl.arange(0, PAGES)
        live = k < n_pages
        page = k + tl.load(shifts + _entry_of(k, ends, n_entries, SEARCH), mask=live, other=0)
        slot = tl.load(slot_of + page, mask=live, other=0)
        tl.debug_barrier()
        tl.store(slot_of + page, -1, mask=live)
        tl.store(stack + k, slot, mask=live)
