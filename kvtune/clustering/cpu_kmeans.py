"""Assignment on CPU: single-threaded matrix products on cached blocks, one worker a segment.

A block of scores is made transposed, [centroids, tokens], so that the running maximum over centroids is
plain vertical vector code; it stays in cache and is never kept. Workers share nothing, so results do not
depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

_TOKENS = 512
_CENTROIDS = 512


def refine(keys: Tensor, mean: Tensor, centroids: Tensor, n_segments: int, passes: int) -> Tensor:
    """``passes`` × (assign, move to the mean, normalise) within each segment: see ``backends.Backend``."""
    length, width = keys.shape[1] // n_segments, centroids.shape[1] // n_segments
    centroids = centroids.clone(memory_format=torch.contiguous_format)

    def segment(item: tuple[int, int]) -> None:
        h, s = item
        centred = _centre(keys[h, s * length : (s + 1) * length], mean[h])
        mine = centroids[h, s * width : (s + 1) * width]
        scratch = _Scratch(length)
        for _ in range(passes):
            scratch.assign(centred, mine)
            _move(centred.numpy(), scratch.index, mine.numpy())

    _parallel(segment, [(h, s) for h in range(keys.shape[0]) for s in range(n_segments)])
    return centroids


def assign(keys: Tensor, mean: Tensor, centroids: Tensor) -> Tensor:
    """Best centroid by inner product with the centred keys: [H, N, d], [H, C, d] → [H, N] int64."""
    heads, n, _ = keys.shape
    assignment = torch.empty(heads, n, dtype=torch.int64)

    def block(item: tuple[int, int]) -> None:
        h, start = item
        centred = _centre(keys[h, start : start + _TOKENS], mean[h])
        scratch = _Scratch(len(centred))
        scratch.assign(centred, centroids[h])
        assignment[h, start : start + _TOKENS] = torch.from_numpy(scratch.index)

    _parallel(block, [(h, start) for h in range(heads) for start in range(0, n, _TOKENS)])
    return assignment


def cluster_sums(values: Tensor, assignment: Tensor, sizes: Tensor) -> Tensor:
    """Float32 sums per cluster, tokens added in order: [H, N, dv], [H, N], [H, C] → [H, C, dv]."""
    sums = torch.zeros(*sizes.shape, values.shape[2])
    assignment = assignment.contiguous()

    def head(h: int) -> None:
        _accumulate(values[h].float().contiguous().numpy(), assignment[h].numpy(), sums[h].numpy())

    _parallel(head, range(values.shape[0]))
    return sums


def _centre(keys: Tensor, mean: Tensor) -> Tensor:
    return (keys.float() - mean).contiguous()


class _Scratch:
    """One worker's buffers: a block of scores, and the best score and centroid of n tokens."""

    def __init__(self, n: int) -> None:
        self.scores = torch.empty(_CENTROIDS * _TOKENS)
        self.best = np.empty(n, np.float32)
        self.index = np.empty(n, np.int32)

    def assign(self, keys: Tensor, centroids: Tensor) -> None:
        """Fill ``index`` for keys [n, d] against centroids [c, d]."""
        self.best.fill(-np.inf)
        self.index.fill(0)
        for start in range(0, len(keys), _TOKENS):
            columns = keys[start : start + _TOKENS].T
            best, index = self.best[start : start + _TOKENS], self.index[start : start + _TOKENS]
            for first in range(0, len(centroids), _CENTROIDS):
                rows = centroids[first : first + _CENTROIDS]
                scores = self.scores[: rows.shape[0] * columns.shape[1]].view(len(rows), -1)
                torch.mm(rows, columns, out=scores)
                _fold(scores.numpy(), first, best, index)


def _parallel(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Run ``work`` over ``items`` on as many workers as torch has threads, each single-threaded inside."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work, items):
                pass
    finally:
        torch.set_num_threads(threads)  # a worker's setting is also the default of threads started later


@numba.njit(nogil=True, cache=True)
def _fold(scores, first, best, index):  # type: ignore[no-untyped-def]
    """Fold scores [c, n] of centroids first…first+c-1 into the running best of n tokens."""
    c, n = scores.shape
    top = np.full(n, -np.inf, np.float32)
    row = np.zeros(n, np.int32)
    whole = c - c % 8
    for j in range(0, whole, 8):
        s0, s1, s2, s3 = scores[j], scores[j + 1], scores[j + 2], scores[j + 3]
        s4, s5, s6, s7 = scores[j + 4], scores[j + 5], scores[j + 6], scores[j + 7]
        here = np.int32(j)
        for i in range(n):
            m = max(s0[i], s1[i], s2[i], s3[i], s4[i], s5[i], s6[i], s7[i])
            better = m > top[i]
            top[i] = m if better else top[i]
            row[i] = here if better else row[i]
    for j in range(whole, c):
        for i in range(n):
            if scores[j, i] > top[i]:
                top[i] = scores[j, i]
                row[i] = j
    for i in range(n):
        if top[i] > best[i]:
            j = row[i]
            while scores[j, i] != top[i]:
                j += 1
            best[i] = top[i]
            index[i] = first + j


@numba.njit(nogil=True, cache=True)
def _accumulate(values, assignment, sums):  # type: ignore[no-untyped-def]
    n, width = values.shape
    for i in range(n):
        c = assignment[i]
        for j in range(width):
            sums[c, j] += values[i, j]


@numba.njit(nogil=True, cache=True)
def _move(keys, assignment, centroids):  # type: ignore[no-untyped-def]
    """Move centroids [c, d] to the normalised means of their keys [n, d]; empty ones stay."""
    c, d = centroids.shape
    sums = np.zeros((c, d), np.float32)
    sizes = np.zeros(c, np.int64)
    for i in range(len(keys)):
        sizes[assignment[i]] += 1
        for j in range(d):
            sums[assignment[i], j] += keys[i, j]
    for i in range(c):
        if sizes[i]:
            squares = np.float32(0)
            for j in range(d):
                centroids[i, j] = sums[i, j] / np.float32(sizes[i])
                squares += centroids[i, j] * centroids[i, j]
            if squares > 0:
                norm = np.sqrt(squares)
                for j in range(d):
                    centroids[i, j] /= norm
