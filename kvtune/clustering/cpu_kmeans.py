"""The hot steps of k-means on CPU: a fused assignment kernel, one worker a segment.

Workers share nothing and a worker is one thread, so results do not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from kvtune.clustering.cpu_kernel import KEYS, ROWS, fold

_TOKENS = 512  # keys a task of the global pass takes
_CENTROIDS = 240  # centroids that meet all keys of a task from cache; a multiple of ROWS


def refine(keys: Tensor, mean: Tensor, centroids: Tensor, n_segments: int, passes: int) -> Tensor:
    """``passes`` × (assign, move to the mean, normalise) within each segment: see ``backends.Backend``."""
    length, width = keys.shape[1] // n_segments, centroids.shape[1] // n_segments
    centroids = centroids.clone(memory_format=torch.contiguous_format)

    def segment(item: tuple[int, int]) -> None:
        h, s = item
        centred = _centre(keys[h, s * length : (s + 1) * length], mean[h])
        mine = centroids[h, s * width : (s + 1) * width].numpy()
        panels = _panels(centred)
        for _ in range(passes):
            _move(centred, _nearest(panels, mine), mine)

    _parallel(segment, [(h, s) for h in range(keys.shape[0]) for s in range(n_segments)])
    return centroids


def assign(keys: Tensor, mean: Tensor, centroids: Tensor) -> Tensor:
    """Best centroid by inner product with the centred keys: [H, N, d], [H, C, d] → [H, N] int64."""
    heads, n, _ = keys.shape
    assignment = torch.empty(heads, n, dtype=torch.int64)

    def block(item: tuple[int, int]) -> None:
        h, start = item
        centred = _centre(keys[h, start : start + _TOKENS], mean[h])
        index = _nearest(_panels(centred), centroids[h].contiguous().numpy())
        assignment[h, start : start + _TOKENS] = torch.from_numpy(index[: len(centred)])

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


def _centre(keys: Tensor, mean: Tensor) -> np.ndarray:
    return (keys.float() - mean).contiguous().numpy()


def _panels(keys: np.ndarray) -> np.ndarray:
    """Keys [n, d] as panels [⌈n / KEYS⌉, d, KEYS], the last one filled up with zeros."""
    n, dim = keys.shape
    padded = np.zeros((-(-n // KEYS) * KEYS, dim), np.float32)
    padded[:n] = keys
    return np.ascontiguousarray(padded.reshape(-1, KEYS, dim).swapaxes(1, 2))


def _nearest(panels: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Number of the best of the centroids [c, d] for each key of the panels, int32."""
    # Copies of the last centroid fill the last tile: they score the same and so never win.
    filled = np.pad(centroids, ((0, -len(centroids) % ROWS), (0, 0)), mode="edge")
    best = np.full((len(panels), KEYS), -np.inf, np.float32)
    index = np.zeros((len(panels), KEYS), np.int32)
    fold(panels, filled, _CENTROIDS, best, index)
    return index.ravel()


def _parallel(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Run ``work`` over ``items`` on as many workers as torch has threads."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(work, items):
            pass


@numba.njit(nogil=True, cache=True)
def _accumulate(values, assignment, sums):  # type: ignore[no-untyped-def]
    """Add each of the values [n, d] to its cluster's row of sums [c, d]."""
    for i in range(len(values)):
        total, value = sums[np.uint64(assignment[i])], values[i]
        for j in range(len(value)):
            total[j] += value[j]


@numba.njit(nogil=True, cache=True)
def _move(keys, assignment, centroids):  # type: ignore[no-untyped-def]
    """Move centroids [c, d] to the normalised means of their keys [n, d]; empty ones stay."""
    sums = np.zeros(centroids.shape, np.float32)
    _accumulate(keys, assignment, sums)
    occupied = np.zeros(len(centroids), np.bool_)
    for i in range(len(keys)):
        occupied[assignment[i]] = True
    for i in range(len(centroids)):
        if occupied[i]:
            _normalise(sums[i], centroids[i])


@numba.njit(nogil=True, cache=True)
def _normalise(vector, out):  # type: ignore[no-untyped-def]
    squares = np.float32(0)
    for x in vector:
        squares += x * x
    norm = np.sqrt(squares) if squares > 0 else np.float32(1)
    for j in range(len(vector)):
        out[j] = vector[j] / norm
