"""CTkvr's first stage: the lists of the nearest query centroids, and the distinct tokens in them.

(arXiv 2512.15550.) Which tokens were listed is kept as a bit a token, so that the candidates come out
distinct and in one order, whatever the order in which the bits were set.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtune.kernels.append import write_token
from kvtune.kernels.tiles import padded

_NORM_FLOOR = 1e-12
"""As in ``torch.nn.functional.normalize``."""

_CENTROIDS, _RUN, _WORDS = 32, 1024, 128


def inverse_norms(rows: Tensor) -> Tensor:
    """1 / ‖row‖ of rows [..., d], [...] float32."""
    return 1 / rows.float().norm(dim=-1).clamp_min(_NORM_FLOOR)


def empty_marks(units: int, tokens: int, device: torch.device | str) -> Tensor:
    """Room for one bit a token, [U, words] int32."""
    return torch.zeros(units, max(1, triton.cdiv(tokens, 32)), dtype=torch.int32, device=device)


def append_and_cut(
    keys: Tensor,
    values: Tensor,
    stored_keys: Tensor,
    stored_values: Tensor,
    resident: Tensor,
    limits: Tensor,
    stop: Tensor,
    sink: int,
    local: int,
) -> None:
    """Write keys [U, d] and values [U, dv] at row ``resident[:, 3]`` of the stored ones; add 1 to it.

    Stored are keys [U, N, d] and values [U, N, dv]. limits [U, 2] int32: the tokens of the prompt, and how
    many tokens may be attended without a choice. Resident become the first ``sink`` rows and, behind the
    prompt's rows that the last ``local`` tokens leave out, all others; ``stop`` [U] int32 gets where those
    left out end. Where they are few enough, all rows are resident and ``stop`` is 0.
    """
    units, dim = keys.shape
    width = values.shape[1]
    _cut_tail_kernel[(units,)](
        keys, values, stored_keys, stored_values, resident, limits, stop, stored_keys.stride(0),
        stored_values.stride(0), dim, width, sink, local,
        DIM=padded(dim), WIDTH=padded(width), num_warps=1,
    )  # fmt: skip


def cosines(queries: Tensor, centroids: Tensor, norms: Tensor, scores: Tensor, marks: Tensor) -> None:
    """Fill ``scores`` [U, C] (float32) with the sum over the group of the cosine to each centroid.

    queries [U, G, d], centroids [U, C, G, d], norms [U, C, G] float32 (:func:`inverse_norms`). ``marks``
    (:func:`empty_marks`) are cleared.
    """
    units, group, dim = queries.shape
    width, words = centroids.shape[1], marks.shape[1]
    programs = triton.cdiv(width, _CENTROIDS)
    _cosine_kernel[(programs, units)](
        queries, centroids, norms, scores, marks, width, dim, words, triton.cdiv(words, programs),
        DIM=padded(dim), GROUP=group, TILE=_CENTROIDS, FLOOR=_NORM_FLOOR, num_warps=4,
    )  # fmt: skip


def probe(
    scores: Tensor, tokens: Tensor, n_lists: Tensor, stop: Tensor, probed: Tensor, marks: Tensor
) -> None:
    """Find the nearest of the first ``n_lists`` [U] centroids, and mark the tokens of their lists.

    scores [U, C], tokens [U, C, R] int32 (-1 as padding), of which those below ``stop`` [U] count. probed
    [U, P] int32 gets the centroids, best first, ties to the lowest, -1 as padding.
    """
    units, width = scores.shape
    _probe_kernel[(probed.shape[1], units)](
        scores, tokens, n_lists, stop, probed, marks, width, tokens.shape[2], marks.shape[1],
        WIDTH=padded(width), RUN=min(_RUN, padded(tokens.shape[2])), num_warps=8,
    )  # fmt: skip


def list_marked(marks: Tensor, rows: Tensor, n_rows: Tensor, plan: Tensor) -> None:
    """Fill ``rows`` [U, S] int32 with the tokens marked, the last first, and ``n_rows`` [U] with their count.

    The count goes to the first column of ``plan`` [U, 4] too. No more than S tokens may be marked.
    """
    units, words = marks.shape
    _list_kernel[(triton.cdiv(words, _WORDS), units)](
        marks, rows, n_rows, plan, words, rows.shape[1], WORDS=_WORDS, AHEAD=1024, num_warps=4
    )


@triton.jit
def _cut_tail_kernel(
    keys, values, stored_keys, stored_values, resident, limits, stop, key_stride, value_stride, dim, width,
    sink, local, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    row = tl.load(resident + unit * 4 + 3)
    write_token(
        keys, values, stored_keys, stored_values, unit, row, key_stride, value_stride, dim, width, DIM, WIDTH
    )
    count = row + 1
    tail = tl.maximum(tl.minimum(count - local, tl.load(limits + unit * 2)), sink)
    whole = tl.load(limits + unit * 2 + 1) >= tail - sink
    start = tl.where(whole, sink, tail)
    tl.store(resident + unit * 4 + 1, tl.minimum(sink, count))
    tl.store(resident + unit * 4 + 2, tl.minimum(start, count))
    tl.store(resident + unit * 4 + 3, count)
    tl.store(stop + unit, tl.where(whole, 0, tail))


@triton.jit
def _cosine_kernel(
    queries, centroids, norms, scores, marks, width, dim, words, share,
    DIM: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    centroid = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = centroid < width
    channel = tl.arange(0, DIM)
    total = tl.zeros([TILE], tl.float32)
    for head in tl.static_range(GROUP):
        at = (unit * GROUP + head) * dim + channel
        query = tl.load(queries + at, mask=channel < dim, other=0.0).to(tl.float32)
        query = query / tl.maximum(tl.sqrt(tl.sum(query * query, 0)), FLOOR)
        place = (unit * width + centroid) * GROUP + head
        rows = tl.load(
            centroids + place[:, None] * dim + channel[None, :],
            mask=real[:, None] & (channel < dim)[None, :],
            other=0.0,
        ).to(tl.float32)
        norm = tl.load(norms + place, mask=real, other=0.0)
        total += tl.sum(rows * query[None, :], 1) * norm
    tl.store(scores + unit * width + centroid, total, mask=real)
    first = tl.program_id(0) * share
    for word in range(first, tl.minimum(first + share, words), 256):
        own = word + tl.arange(0, 256)
        inside = (own < words) & (own < first + share)
        tl.store(marks + unit * words + own, tl.zeros([256], tl.int32), mask=inside)


@triton.jit
def _probe_kernel(
    scores, tokens, n_lists, stop, probed, marks, width, length, words,
    WIDTH: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Program i finds the i-th nearest centroid, by taking the best away i times, and marks its list."""
    unit, turn = tl.program_id(1).to(tl.int64), tl.program_id(0)
    count, end = tl.load(n_lists + unit), tl.load(stop + unit)
    centroid = tl.arange(0, WIDTH)
    left = tl.load(scores + unit * width + centroid, mask=centroid < count, other=float("-inf"))
    found = tl.full((), -1, tl.int32)
    for _ in range(0, tl.minimum(turn + 1, count)):
        found = tl.min(tl.where(left == tl.max(left, 0), centroid, WIDTH), 0)
        left = tl.where(centroid == found, float("-inf"), left)
    found = tl.where((turn < count) & (found < count), found, -1)
    tl.store(probed + unit * tl.num_programs(0) + turn, found)
    if (found >= 0) & (end > 0):
        for at in range(0, length, RUN):
            entry = at + tl.arange(0, RUN)
            token = tl.load(tokens + (unit * width + found) * length + entry, mask=entry < length, other=-1)
            bit = tl.full([RUN], 1, tl.int32) << (token & 31)
            wanted = (token >= 0) & (token < end)
            tl.atomic_or(marks + unit * words + (token >> 5), bit, mask=wanted, sem="relaxed")


@triton.jit
def _bits(words):
    """How many bits of each word (uint32) are set, int32."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words = words + (words >> 8)
    return ((words + (words >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _list_kernel(marks, rows, n_rows, plan, words, width, WORDS: tl.constexpr, AHEAD: tl.constexpr):
    """Each program lists the tokens of some words, behind those of all words after them."""
    unit, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * WORDS
    marks += unit * words
    ahead = tl.zeros([AHEAD], tl.int32)
    for at in range(first + WORDS, words, AHEAD):
        later = at + tl.arange(0, AHEAD)
        ahead += _bits(tl.load(marks + later, mask=later < words, other=0).to(tl.uint32, bitcast=True))
    own = first + tl.arange(0, WORDS)
    word = tl.load(marks + own, mask=own < words, other=0).to(tl.uint32, bitcast=True)
    counts = _bits(word)
    last = tl.sum(ahead, 0) + tl.sum(counts, 0)
    behind = last - tl.cumsum(counts, 0)
    bit = tl.arange(0, 32)[None, :]
    rest = word[:, None] >> bit.to(tl.uint32)
    slot = behind[:, None] + _bits(rest >> 1)
    tl.store(rows + unit * width + slot, own[:, None] * 32 + bit, mask=(rest & 1) > 0)
    if tl.program_id(0) == 0:
        tl.store(n_rows + unit, last)
        tl.store(plan + unit * 4, last)
