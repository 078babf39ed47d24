"""The hot steps of k-means on CUDA, in Triton: fused assignment, counting sort by cluster, segment means.

Products are of 16-bit operands with float32 sums; scores stay in registers. Per pass and per key the
device reads the key twice (assignment, means) and writes 4 bytes of assignment and 4 of order.

The assignment keeps a tile of keys in registers and streams the centroids past it. The maximum over the
scores of one tile is folded while the tensor cores already work on the next, and costs two instructions
a score: a thread's column number replaces the lowest bits of the score (4 of 23 mantissa bits at 64
centroids a tile), so that a plain maximum carries its index along. Scores that differ by less than those
bits count as ties.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_LOWEST = tl.constexpr(-3.0e38)


@dataclass(frozen=True)
class Tiles:
    """Launch shape of the assignment: keys and centroids per tile, warps, tiles of centroids in flight."""

    keys: int = 128
    centroids: int = 64
    warps: int = 4
    stages: int = 3


LOCAL = Tiles()
GLOBAL = Tiles()


def supports(keys: Tensor) -> bool:
    """Whether the device has a tensor copy engine (Hopper on), and rows are aligned and fit on chip."""
    if keys.is_cuda and torch.cuda.get_device_capability(keys.device) < (9, 0):
        return False
    return keys.shape[-1] % 8 == 0 and keys.shape[-1] <= 256


def refine(keys: Tensor, mean: Tensor, centroids: Tensor, n_segments: int, passes: int) -> Tensor:
    """``passes`` × (assign, move to the mean, normalise) within each segment of N // n_segments tokens.

    keys [H, N, d], mean [H, 1, d] float32, centroids [H, C, d] float32 → centroids [H, C, d] float32.
    """
    keys = _loadable(keys)
    problems = Problems(keys, mean, centroids.shape[1], n_segments)
    centroids = centroids.to(_product_dtype(keys)).contiguous()
    for _ in range(passes):
        problems.assign(centroids, LOCAL)
        problems.move(centroids)
    return centroids.float()


def assign(keys: Tensor, mean: Tensor, centroids: Tensor) -> Tensor:
    """Best centroid by inner product with the centred keys: [H, N, d], [H, C, d] → [H, N] int64."""
    keys = _loadable(keys)
    problems = Problems(keys, mean, centroids.shape[1], 1)
    problems.assign(centroids.to(_product_dtype(keys)).contiguous(), GLOBAL)
    return problems.assignment.long()


def cluster_sums(values: Tensor, assignment: Tensor, sizes: Tensor) -> Tensor:
    """Float32 sum of each cluster: [H, N, dv], [H, N] int64, [H, C] int64 → [H, C, dv]."""
    values = values.contiguous()
    heads, n, width = values.shape
    n_centroids = sizes.shape[1]
    sums = torch.empty(heads, n_centroids, width, dtype=torch.float32, device=values.device)
    order, starts = _sort(assignment, sizes)
    _sum_kernel[(n_centroids, heads)](
        values, order, starts, sizes, sums, n, n_centroids, width,
        WIDTH=triton.next_power_of_2(width), ROWS=16, num_warps=1,
    )  # fmt: skip
    return sums


class Problems:
    """Independent k-means problems, one a segment, with the buffers their passes share."""

    def __init__(self, keys: Tensor, mean: Tensor, n_centroids: int, n_segments: int) -> None:
        heads, self.stride, self.dim = keys.shape
        self.keys, self.mean = keys, mean.contiguous()
        self.segments, self.length = n_segments, self.stride // n_segments
        self.count, self.width = heads * n_segments, n_centroids // n_segments
        self.padded = max(16, triton.next_power_of_2(self.dim))
        self.assignment = torch.empty(self.count, self.length, dtype=torch.int32, device=keys.device)
        self.sizes = torch.zeros(self.count, self.width, dtype=torch.int32, device=keys.device)

    def assign(self, centroids: Tensor, tiles: Tiles) -> None:
        """Fill ``assignment`` and ``sizes`` (zero before)."""
        if self.padded > 128:
            tiles = replace(tiles, keys=tiles.keys // 2)
        key_tiles = TensorDescriptor.from_tensor(self.keys.flatten(0, 1), [tiles.keys, self.padded])
        centroid_tiles = TensorDescriptor.from_tensor(
            centroids.view(-1, self.dim), [tiles.centroids, self.padded]
        )
        _assign_kernel[(triton.cdiv(self.length, tiles.keys), self.count)](
            key_tiles, self.mean, centroid_tiles, self.assignment, self.sizes,
            self.stride, self.length, self.segments, self.width, self.dim,
            KEYS=tiles.keys, CENTROIDS=tiles.centroids, DIM=self.padded, STAGES=tiles.stages,
            num_warps=tiles.warps,
        )  # fmt: skip

    def move(self, centroids: Tensor, rows: int = 16, warps: int = 1) -> None:
        """Move ``centroids`` to the normalised means of their keys and zero ``sizes``.

        One program a cluster; ``rows`` of its keys are fetched at a time.
        """
        order, starts = _sort(self.assignment, self.sizes)
        _move_kernel[(self.width, self.count)](
            self.keys, self.mean, order, starts, self.sizes, centroids,
            self.stride, self.length, self.segments, self.width, self.dim,
            DIM=self.padded, ROWS=rows, num_warps=warps,
        )  # fmt: skip


def _loadable(keys: Tensor) -> Tensor:
    return (keys.float() if keys.dtype == torch.float64 else keys).contiguous()


def _product_dtype(keys: Tensor) -> torch.dtype:
    return torch.float16 if keys.dtype == torch.float16 else torch.bfloat16


def _sort(assignment: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens grouped by cluster, in any order within one: order [B, n] and starts [B, c], both int32."""
    batch, n = assignment.shape
    order = torch.empty(batch, n, dtype=torch.int32, device=assignment.device)
    ends = sizes.cumsum(1, dtype=torch.int32)
    block = 1024
    _place_kernel[(triton.cdiv(n, block), batch)](
        assignment, ends, order, n, sizes.shape[1], BLOCK=block, num_warps=8
    )
    return order, ends  # each end has been counted down to its cluster's start


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
def _assign_kernel(
    key_tiles, mean, centroid_tiles, assignment, sizes, stride, length, segments, width, dim,
    KEYS: tl.constexpr, CENTROIDS: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    problem = tl.program_id(1)
    head = problem // segments
    first = tl.program_id(0) * KEYS
    keys = key_tiles.load([head * stride + (problem % segments) * length + first, 0])
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
    tl.store(assignment + problem * length + tokens, winner, mask=tokens < length)
    tl.atomic_add(sizes + problem * width + winner, 1, mask=tokens < length, sem="relaxed")


@triton.jit
def _place_kernel(assignment, ends, order, n, n_clusters, BLOCK: tl.constexpr):
    batch = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < n
    cluster = tl.load(assignment + batch * n + tokens, mask=inside, other=0)
    slot = tl.atomic_add(ends + batch * n_clusters + cluster, -1, mask=inside, sem="relaxed") - 1
    tl.store(order + batch * n + slot, tokens, mask=inside)


@triton.jit
def _sum_rows(values, order, count, dim, DIM: tl.constexpr, ROWS: tl.constexpr):
    """Float32 sum of rows ``order[0…count-1]`` of values [_, dim]."""
    columns = tl.arange(0, DIM)
    total = tl.zeros([DIM], tl.float32)
    for start in tl.range(0, count, ROWS):
        slots = start + tl.arange(0, ROWS)
        rows = tl.load(order + slots, mask=slots < count, other=0).to(tl.int64)
        inside = (slots < count)[:, None] & (columns < dim)[None, :]
        block = tl.load(values + rows[:, None] * dim + columns[None, :], mask=inside, other=0.0)
        total += tl.sum(block.to(tl.float32), 0)
    return total


@triton.jit
def _sum_kernel(
    values, order, starts, sizes, sums, n, n_clusters, width, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64)
    cluster = head * n_clusters + tl.program_id(0)
    count = tl.load(sizes + cluster).to(tl.int32)
    members = order + head * n + tl.load(starts + cluster)
    total = _sum_rows(values + head * n * width, members, count, width, WIDTH, ROWS)
    columns = tl.arange(0, WIDTH)
    tl.store(sums + cluster * width + columns, total, mask=columns < width)


@triton.jit
def _move_kernel(
    keys, mean, order, starts, sizes, centroids, stride, length, segments, width, dim,
    DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    problem = tl.program_id(1).to(tl.int64)
    head = problem // segments
    cluster = problem * width + tl.program_id(0)
    count = tl.load(sizes + cluster)
    tl.store(sizes + cluster, 0)
    members = order + problem * length + tl.load(starts + cluster)
    rows = keys + (head * stride + (problem % segments) * length) * dim
    total = _sum_rows(rows, members, count, dim, DIM, ROWS)
    columns = tl.arange(0, DIM)
    total -= count * tl.load(mean + head * dim + columns, mask=columns < dim, other=0.0)
    norm = tl.sqrt(tl.sum(total * total, 0))
    unit = total / tl.where(norm > 0, norm, 1.0)
    written = tl.where(count > 0, dim, 0)  # an empty cluster keeps its centroid
    tl.store(centroids + cluster * dim + columns, unit.to(centroids.dtype.element_ty), mask=columns < written)
