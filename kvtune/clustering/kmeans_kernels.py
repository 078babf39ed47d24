"""The Triton kernels of k-means: quantise, assign, place by cluster, move to the mean, sum.

The assignment keeps a tile of keys on chip and streams the centroids past it. The maximum over the scores
of one tile is folded while the tensor cores already work on the next, and costs two instructions a score: a
thread's column number replaces the lowest bits of the score (4 of 23 mantissa bits at 64 centroids a tile),
so that a plain maximum carries its index along. Scores that differ by less than those bits count as ties.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.0e38)
_LARGEST = tl.constexpr(224.0)


@triton.jit
def _rounded(items):
    """Float32 items rounded to 1 + 3 bits. The cast to e4m3 has nothing left to round then, which it does
    differently on a GPU and in the interpreter (without a carry)."""
    bits = items.to(tl.int32, bitcast=True) + (1 << 19)
    return ((bits >> 20) << 20).to(tl.float32, bitcast=True)


@triton.jit
def quantise_kernel(keys, mean, narrow, scales, n, dim, DIM: tl.constexpr, ROWS: tl.constexpr):
    """Centred keys at 8 bits, each by a scale of its own: keys [H, n, dim] = narrow * scales [H, n]."""
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DIM)
    inside = (tokens < n)[:, None] & (columns < dim)[None, :]
    places = (head * n + tokens)[:, None] * dim + columns[None, :]
    centre = tl.load(mean + head * dim + columns, mask=columns < dim, other=0.0)
    rows = tl.load(keys + places, mask=inside, other=0.0).to(tl.float32) - centre[None, :]
    rows = tl.where(inside, rows, 0.0)
    largest = tl.max(tl.abs(rows), 1)
    scale = tl.where(largest > 0, largest, 1.0) / _LARGEST
    tl.store(narrow + places, _rounded(rows / scale[:, None]).to(narrow.dtype.element_ty), mask=inside)
    tl.store(scales + head * n + tokens, scale, mask=tokens < n)


@triton.jit
def _fold(scores, best, tile, start, mask, KEYS: tl.constexpr, CENTROIDS: tl.constexpr):
    """Fold scores [KEYS, CENTROIDS] of the tile at ``start`` into the running best [KEYS, 4].

    A tensor core leaves columns 8·i + 2·lane + {0, 1} of a row to each of four lanes: they keep their
    own best. The complement of the column's number within a lane goes into the score's lowest bits, so
    that the lowest column wins a tie.
    """
    SLOTS: tl.constexpr = CENTROIDS // 4
    slot = SLOTS - 1 - (tl.arange(0, CENTROIDS // 8)[:, None] * 2 + tl.arange(0, 2)[None, :])
    by_lane = tl.reshape(scores, [KEYS, CENTROIDS // 8, 4, 2]).to(tl.int32, bitcast=True)
    packed = (by_lane & mask[None, None, :, None]) | slot[None, :, None, :]
    top = tl.max(tl.max(packed.to(tl.float32, bitcast=True), 3), 1)
    bar = best.to(tl.int32, bitcast=True) | (SLOTS - 1)
    better = top > bar.to(tl.float32, bitcast=True)
    return tl.where(better, top, best), tl.where(better, start, tile)


@triton.jit
def _winner(best, tile, CENTROIDS: tl.constexpr):
    """Index of each key's best centroid, from the best of its four lanes: [KEYS, 4] → [KEYS]."""
    SLOTS: tl.constexpr = CENTROIDS // 4
    bits = best.to(tl.int32, bitcast=True)
    slot = SLOTS - 1 - (bits & (SLOTS - 1))
    column = tile + (slot // 2) * 8 + tl.arange(0, 4)[None, :] * 2 + slot % 2
    score = (bits & -SLOTS).to(tl.float32, bitcast=True)
    return tl.min(tl.where(score == tl.max(score, 1)[:, None], column, 0x7FFFFFFF), 1)


@triton.jit
def assign_kernel(
    key_tiles, mean, centroid_tiles, assignment, ranks, sizes, stride, length, segments, width, dim,
    KEYS: tl.constexpr, CENTROIDS: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """Best centroid of each key, its rank among the cluster's keys, and the clusters' sizes (zero before)."""
    problem = tl.program_id(1)
    head = problem // segments
    first = tl.program_id(0) * KEYS
    keys = key_tiles.load([head * stride + (problem % segments) * length + first, 0])
    if not CENTRED:
        columns = tl.arange(0, DIM)
        centre = tl.load(mean + head * dim + columns, mask=columns < dim, other=0.0)
        keys = (keys.to(tl.float32) - centre[None, :]).to(centroid_tiles.dtype)

    best = tl.full([KEYS, 4], _LOWEST, tl.float32)
    tile = tl.zeros([KEYS, 4], tl.int32)
    # Always -CENTROIDS // 4; made to look lane-dependent, or the compiler splits mask and index in two.
    mask = tl.where(tl.arange(0, 4) < length + 4, -(CENTROIDS // 4), 0)
    scores = tl.dot(keys, centroid_tiles.load([problem * width, 0]).T)
    for following in tl.range(CENTROIDS, width, CENTROIDS, num_stages=STAGES):
        ahead = tl.dot(keys, centroid_tiles.load([problem * width + following, 0]).T)
        best, tile = _fold(scores, best, tile, following - CENTROIDS, mask, KEYS, CENTROIDS)
        scores = ahead
    start = (width - 1) // CENTROIDS * CENTROIDS
    inside = start + tl.arange(0, CENTROIDS) < width
    scores = tl.where(inside[None, :], scores, _LOWEST)
    best, tile = _fold(scores, best, tile, start, mask, KEYS, CENTROIDS)

    winner = _winner(best, tile, CENTROIDS)
    tokens = first + tl.arange(0, KEYS)
    rank = tl.atomic_add(sizes + problem * width + winner, 1, mask=tokens < length, sem="relaxed")
    tl.store(assignment + problem * length + tokens, winner, mask=tokens < length)
    tl.store(ranks + problem * length + tokens, rank, mask=tokens < length)


@triton.jit
def rank_kernel(assignment, sizes, ranks, n, n_clusters, BLOCK: tl.constexpr):
    """Rank of each token among those of its cluster, in any order; counts ``sizes`` (zero before)."""
    batch = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < n
    cluster = tl.load(assignment + batch * n + tokens, mask=inside, other=0)
    rank = tl.atomic_add(sizes + batch * n_clusters + cluster, 1, mask=inside, sem="relaxed")
    tl.store(ranks + batch * n + tokens, rank, mask=inside)


@triton.jit
def place_kernel(assignment, ranks, ends, order, n, n_clusters, BLOCK: tl.constexpr):
    """Tokens grouped by cluster: each goes to its rank before the end of its cluster."""
    batch = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < n
    cluster = tl.load(assignment + batch * n + tokens, mask=inside, other=0)
    rank = tl.load(ranks + batch * n + tokens, mask=inside, other=0)
    slot = tl.load(ends + batch * n_clusters + cluster, mask=inside, other=1) - 1 - rank
    tl.store(order + batch * n + slot, tokens, mask=inside)


@triton.jit
def _sum_rows(
    values, scales, order, first, counts, dim,
    TOGETHER: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Float32 sums [TOGETHER, DIM] of the rows ``order[first … first + counts]`` of values [_, dim].

    first and counts [TOGETHER]; each row is times its scale if ``SCALED``.
    """
    columns = tl.arange(0, DIM)
    totals = tl.zeros([TOGETHER, DIM], tl.float32)
    for start in tl.range(0, tl.max(counts), ROWS):
        slots = start + tl.arange(0, ROWS)
        used = slots[None, :] < counts[:, None]
        rows = tl.load(order + first[:, None] + slots[None, :], mask=used, other=0).to(tl.int64)
        inside = used[:, :, None] & (columns < dim)[None, None, :]
        block = tl.load(values + rows[:, :, None] * dim + columns[None, None, :], mask=inside, other=0.0)
        block = block.to(tl.float32)
        if SCALED:
            block *= tl.load(scales + rows, mask=used, other=0.0)[:, :, None]
        totals += tl.sum(block, 1)
    return totals


@triton.jit
def sum_kernel(
    values, order, ends, sizes, sums, n, n_clusters, dim,
    TOGETHER: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Float32 sums of the values of each cluster; ``TOGETHER`` clusters a program."""
    head = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    there = own < n_clusters
    clusters = head * n_clusters + own
    counts = tl.load(sizes + clusters, mask=there, other=0)
    first = tl.load(ends + clusters, mask=there, other=0) - counts
    totals = _sum_rows(
        values + head * n * dim, values, order + head * n, first, counts, dim, TOGETHER, DIM, ROWS, False
    )
    columns = tl.arange(0, DIM)
    inside = there[:, None] & (columns < dim)[None, :]
    tl.store(sums + clusters[:, None] * dim + columns[None, :], totals, mask=inside)


@triton.jit
def move_kernel(
    keys, scales, mean, order, ends, sizes, before, after, gain_before, gain_after,
    stride, length, segments, width, dim,
    TOGETHER: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    SCALED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Normalised means of the clusters, times ``gain_after``; an empty cluster keeps its centroid.

    Keys are centred and scaled where ``SCALED``, else as they are; ``ROUNDED`` for 8-bit centroids. Zeroes
    ``sizes``. ``TOGETHER`` clusters a program.
    """
    problem = tl.program_id(1).to(tl.int64)
    head = problem // segments
    own = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    there = own < width
    clusters = problem * width + own
    counts = tl.load(sizes + clusters, mask=there, other=0)
    tl.store(sizes + clusters, 0, mask=there)
    first = tl.load(ends + clusters, mask=there, other=0) - counts
    start = head * stride + (problem % segments) * length
    totals = _sum_rows(
        keys + start * dim, scales + start, order + problem * length, first, counts, dim,
        TOGETHER, DIM, ROWS, SCALED,
    )  # fmt: skip
    columns = tl.arange(0, DIM)
    if not SCALED:
        centre = tl.load(mean + head * dim + columns, mask=columns < dim, other=0.0)
        totals -= counts[:, None] * centre[None, :]
    norms = tl.sqrt(tl.sum(totals * totals, 1))
    units = totals / tl.where(norms > 0, norms, 1.0)[:, None]
    places = clusters[:, None] * dim + columns[None, :]
    inside = there[:, None] & (columns < dim)[None, :]
    kept = tl.load(before + places, mask=inside, other=0.0).to(tl.float32) / gain_before
    moved = tl.where((counts > 0)[:, None], units, kept) * gain_after
    if ROUNDED:
        moved = _rounded(moved)
    tl.store(after + places, moved.to(after.dtype.element_ty), mask=inside)
