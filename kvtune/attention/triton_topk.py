"""Exact top-k keys of decode queries on a GPU, in two Triton kernels: one scan of the keys, one search.

The scan reads each tile of keys once for all query heads of its kv head and all steps asked together. It
leaves the scores (float32 sums of 16-bit products) and their maxima over groups of ``keys`` and of 16 keys.
The search, one program a query, goes down that tree: the k best keys lie in the k groups of largest maximum,
and in the k subgroups of largest maximum of those. That holds with ties too, where the lower position wins
at each level: a key outside those groups has k groups before it, each with a key that ranks before it. So
k · (keys / 16 + 16) numbers are read after the maxima of the groups, whatever the scores are.

Ranks are those of raw products: a positive scaling and a softcap keep them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_K = 128
SUBGROUP = 16
"""Keys of a subgroup."""
SCRATCH_BYTES = 512 << 20
"""Scores held at once; more steps take turns."""
_UNLIMITED = 1 << 40
_SUB = tl.constexpr(SUBGROUP)
_INFINITY = tl.constexpr(float("inf"))


@dataclass(frozen=True)
class Tiles:
    """Launch shape. Scan: keys a tile, tiles a program, warps, loads in flight. Search: warps."""

    keys: int = 64
    span: int = 8
    warps: int = 4
    stages: int = 3
    search_warps: int = 8


def supports(queries: Tensor, keys: Tensor, k: int) -> bool:
    """Whether the kernels take queries [T, H, G, d] and keys [H, N, d], and k is at most ``MAX_K``."""
    return (
        keys.dtype in (torch.float16, torch.bfloat16)
        and queries.dtype == keys.dtype
        and queries.device == keys.device
        and keys.shape[-1] <= 256
        and 0 < keys.shape[1] <= 1 << 21
        and 1 <= k <= MAX_K
        and not (keys.is_cuda and torch.cuda.get_device_capability(keys.device) < (8, 0))
    )


def top_keys(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    k: int,
    window: int | None = None,
    excluded: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """The k keys of largest inner product of each query, best first, ties to the lowest: [T, H, G, k] int32.

    queries [T, H, G, d] at positions [T] int64, keys [H, N, d] (row = position). A query sees keys at
    positions ≤ its own, within ``window`` tokens, that are not ``excluded`` (bool [T, H, N]); -1 where there
    are fewer than k.
    """
    steps, heads, group, _ = queries.shape
    best = torch.empty(steps, heads, group, k, dtype=torch.int32, device=keys.device)
    size = max(1, SCRATCH_BYTES // (4 * heads * group * keys.shape[1]))
    for start in range(0, steps, size):
        part = slice(start, start + size)
        struck = None if excluded is None else excluded[part]
        search(scan(queries[part], keys, positions[part], window, struck, tiles or Tiles()), best[part])
    return best


@dataclass
class Scores:
    """Products of rows (steps, then heads of a group) with keys [H, R, N], -inf where not seen.

    peaks [H, R, …]: the maxima of the groups of ``tiles.keys`` keys, then of their subgroups.
    """

    products: Tensor
    peaks: Tensor
    tiles: Tiles


def scan(
    queries: Tensor,
    keys: Tensor,
    positions: Tensor,
    window: int | None = None,
    excluded: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Scores:
    """Score every key (inputs as :func:`top_keys`)."""
    steps, heads, group, dim = queries.shape
    queries, keys = _rows(queries), _rows(keys)
    excluded = None if excluded is None else excluded.contiguous()
    n, rows, tiles = keys.shape[1], steps * group, tiles or Tiles()
    tile_rows = min(128, max(16, triton.next_power_of_2(rows)))
    if tile_rows > 32:  # scores in registers: two programs a multiprocessor fit, not one
        tiles = replace(tiles, keys=min(tiles.keys, 64), warps=max(tiles.warps, 8))
    groups, fan = triton.cdiv(n, tiles.keys), tiles.keys // SUBGROUP
    products = torch.empty(heads, rows, n, dtype=torch.float32, device=keys.device)
    peaks = torch.empty(heads, rows, groups * (1 + fan), dtype=torch.float32, device=keys.device)
    _scan_kernel[(triton.cdiv(groups, tiles.span), heads, triton.cdiv(rows, tile_rows))](
        queries, keys, positions.contiguous(), excluded, products, peaks,
        n, rows, group, groups, _UNLIMITED if window is None else window,
        *queries.stride()[:3], *keys.stride()[:2],
        D=dim, DIM=max(16, triton.next_power_of_2(dim)), KEYS=tiles.keys, ROWS=tile_rows,
        SPAN=tiles.span, STAGES=tiles.stages, EXCLUDE=excluded is not None, num_warps=tiles.warps,
    )  # fmt: skip
    return Scores(products, peaks, tiles)


def search(scores: Scores, best: Tensor) -> None:
    """Fill ``best`` [T, H, G, k] int32, contiguous, with the keys of the k largest products."""
    heads, rows, n = scores.products.shape
    group, k = best.shape[2:]
    width, groups = max(32, triton.next_power_of_2(k)), triton.cdiv(n, scores.tiles.keys)
    padded = max(width, triton.next_power_of_2(groups))
    _search_kernel[(heads * rows,)](
        scores.products, scores.peaks, best, n, rows, heads, group, groups, k,
        GROUPS=padded, FAN=scores.tiles.keys // SUBGROUP, K=width,
        num_warps=max(scores.tiles.search_warps, min(16, padded // 512)),
    )  # fmt: skip


def _rows(vectors: Tensor) -> Tensor:
    return vectors if vectors.stride(-1) == 1 else vectors.contiguous()


@triton.jit
def _scan_kernel(
    queries, keys, positions, excluded, products, peaks, n, rows, group, groups, window,
    query_step, query_head, query_group, key_head, key_row,
    D: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
    STAGES: tl.constexpr, EXCLUDE: tl.constexpr,
):  # fmt: skip
    FAN: tl.constexpr = KEYS // _SUB
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    step = (row // group).to(tl.int64)
    asked = row < rows
    columns = tl.arange(0, DIM)
    place = queries + head * query_head + step * query_step + (row % group) * query_group
    query = tl.load(
        place[:, None] + columns[None, :], mask=asked[:, None] & (columns < D)[None, :], other=0.0
    )
    last = tl.minimum(tl.load(positions + step, mask=asked, other=-1), n - 1)
    first = last - window + 1
    line = head * rows + row
    for part in tl.range(0, SPAN, num_stages=STAGES):
        tile = tl.program_id(0) * SPAN + part
        key = tile * KEYS + tl.arange(0, KEYS)
        inside = key < n
        vectors = tl.load(
            keys + head * key_head + key.to(tl.int64)[:, None] * key_row + columns[None, :],
            mask=inside[:, None] & (columns < D)[None, :],
            other=0.0,
        )
        score = tl.dot(vectors, tl.trans(query))
        seen = (key[:, None] <= last[None, :]) & (key[:, None] >= first[None, :])
        wanted = inside[:, None] & asked[None, :]
        if EXCLUDE:
            struck = excluded + (step * tl.num_programs(1) + head)[None, :] * n + key[:, None]
            seen &= tl.load(struck, mask=wanted, other=0) == 0
        score = tl.where(seen, score, -_INFINITY)
        tl.store(products + line[None, :] * n + key[:, None], score, mask=wanted)
        lower = tl.max(tl.reshape(score, [FAN, _SUB, ROWS]), 1)
        kept = row < tl.where(tile < groups, rows, 0)
        peak = peaks + line * (groups * (FAN + 1)) + tile
        tl.store(peak, tl.max(lower, 0), mask=kept)
        subgroup = groups + tile * (FAN - 1) + tl.arange(0, FAN)
        tl.store(peak[None, :] + subgroup[:, None], lower, mask=kept[None, :])


@triton.jit
def _ordered(scores):
    """Integers that order like the scores."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 equals 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _first(values, low, k, K: tl.constexpr):
    """Places [K] of the k largest of values [M] int32 in ascending order (the lower place wins ties).

    At least k values are ``low`` or more. Beyond k the places are M. Returns a new ``low``, too: the k-th
    largest value, or one below it that no fewer than k values reach.
    """
    high = tl.max(values, 0) + 1
    reach = tl.sum((values >= low).to(tl.int32), 0)
    # A four-way search for a bound that k values reach; it ends where exactly k do, or at the k-th value.
    while (reach > k) & (low != high - 1):
        second = (low & high) + ((low ^ high) >> 1)  # halfway, without overflow
        first = (low & second) + ((low ^ second) >> 1)
        third = (second & high) + ((second ^ high) >> 1)
        counts = (values >= first).to(tl.int64) + ((values >= second).to(tl.int64) << 20)
        counts = tl.sum(counts + ((values >= third).to(tl.int64) << 40), 0)
        a, b, c = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
        high = tl.where(a < k, first, tl.where(b < k, second, tl.where(c < k, third, high)))
        low = tl.where(c >= k, third, tl.where(b >= k, second, tl.where(a >= k, first, low)))
        reach = tl.where(c >= k, c, tl.where(b >= k, b, tl.where(a >= k, a, reach))).to(tl.int32)
    above = (values >= high).to(tl.int32)
    tied = (values >= low).to(tl.int32) - above
    needed = k - tl.sum(above, 0)
    taken = tl.cumsum(above, 0) + tl.minimum(tl.cumsum(tied, 0), needed)
    # The j-th place taken is the number of places up to which at most j are taken.
    return tl.cumsum(tl.histogram(taken, K, taken < K), 0), low


@triton.jit
def _search_kernel(
    products, peaks, best, n, rows, heads, group, groups, k,
    GROUPS: tl.constexpr, FAN: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    lowest = -2139095041  # -inf, ordered
    line = tl.program_id(0).to(tl.int64)
    peak = peaks + line * (groups * (FAN + 1))
    slot = tl.arange(0, K)
    place = tl.arange(0, GROUPS)
    found = tl.load(peak + place, mask=place < groups, other=-_INFINITY)
    chosen, low = _first(_ordered(found), lowest, k, K)

    place = tl.reshape(chosen[:, None] * FAN + tl.arange(0, FAN)[None, :], [K * FAN])
    found = tl.load(peak + groups + place, mask=place < groups * FAN, other=-_INFINITY)
    lower, low = _first(_ordered(found), low, k, K)
    chosen = tl.gather(chosen, tl.minimum(lower // FAN, K - 1), 0) * FAN + lower % FAN

    place = tl.reshape(chosen[:, None] * _SUB + tl.arange(0, _SUB)[None, :], [K * _SUB])
    found = tl.load(products + line * n + place, mask=place < n, other=-_INFINITY)
    lower, low = _first(_ordered(found), low, k, K)
    chosen = tl.gather(chosen, tl.minimum(lower // _SUB, K - 1), 0) * _SUB + lower % _SUB

    found = _ordered(tl.load(products + line * n + chosen, mask=(slot < k) & (chosen < n), other=-_INFINITY))
    earlier = (found[None, :] == found[:, None]) & (slot[None, :] < slot[:, None])
    rank = tl.sum(((found[None, :] > found[:, None]) | earlier).to(tl.int32), 1)
    head, row = line // rows, line % rows
    out = best + (((row // group) * heads + head) * group + row % group) * k
    tl.store(out + rank, tl.where(found > lowest, chosen, -1), mask=slot < k)
