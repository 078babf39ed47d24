"""From blocks to pages: dense ids that compiled replays can index, and back to whole requests."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvtune.caching.access_log import UnitAccesses
from kvtune.errors import InputError

TABLE_SLOTS = 1 << 22
"""Largest direct table of ids; logs with higher ids are renumbered by sorting."""


def dense_ids(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Renumber non-negative ids to 0…m-1, equal ids alike: ([n] int64, m)."""
    if len(ids) == 0:
        return np.zeros(0, np.int64), 0
    if ids.max() < max(TABLE_SLOTS, 4 * len(ids)):
        return _first_seen_order(ids, int(ids.max()) + 1)
    distinct, inverse = np.unique(ids, return_inverse=True)
    return inverse.astype(np.int64), len(distinct)


def dense_blocks(accesses: UnitAccesses) -> tuple[NDArray[np.int64], int]:
    """Dense ids of a unit's block accesses, [n] int64, and how many distinct blocks there are.

    A block read twice in one step is an ``InputError``: a selection holds each block at most once.
    """
    ids, n_blocks = dense_ids(accesses.blocks)
    step = _repeating_step(accesses.offsets, ids, n_blocks)
    if step >= 0:
        raise InputError(f"access log: a block is read twice at step {step}")
    return ids, n_blocks


def page_sequence(accesses: UnitAccesses) -> tuple[NDArray[np.int64], int]:
    """The page accesses of a unit in order, a block of p pages reading its pages 0…p-1.

    Returns dense page ids [sum of pages] int64 and how many distinct pages there are. A block that grows
    keeps its earlier pages: page i of a block is always the same page.
    """
    ids, n_blocks = dense_blocks(accesses)
    return _expand(ids, n_blocks, accesses.pages)


def request_hits(accesses: UnitAccesses, page_hits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each request hits [n]: all of its pages do. ``page_hits`` [sum of pages]."""
    if len(accesses.pages) == 0:
        return np.zeros(0, np.bool_)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(accesses.pages)[:-1]])
    return np.logical_and.reduceat(page_hits, starts)


@njit(cache=True, nogil=True)
def _first_seen_order(ids, slots):
    table = np.full(slots, -1, np.int64)
    dense = np.empty(len(ids), np.int64)
    count = 0
    for k in range(len(ids)):
        if table[ids[k]] < 0:
            table[ids[k]] = count
            count += 1
        dense[k] = table[ids[k]]
    return dense, count


@njit(cache=True, nogil=True)
def _repeating_step(offsets, ids, n_blocks):
    """The first step that reads a block twice, or -1."""
    read_at = np.full(n_blocks, -1, np.int64)
    for step in range(len(offsets) - 1):
        for k in range(offsets[step], offsets[step + 1]):
            if read_at[ids[k]] == step:
                return step
            read_at[ids[k]] = step
    return -1


@njit(cache=True, nogil=True)
def _expand(ids, n_blocks, pages):
    most = np.zeros(n_blocks, np.int64)
    total = 0
    for k in range(len(ids)):
        most[ids[k]] = max(most[ids[k]], pages[k])
        total += pages[k]
    first = np.zeros(n_blocks + 1, np.int64)
    for block in range(n_blocks):
        first[block + 1] = first[block] + most[block]
    sequence = np.empty(total, np.int64)
    at = 0
    for k in range(len(ids)):
        for page in range(pages[k]):
            sequence[at] = first[ids[k]] + page
            at += 1
    return sequence, first[n_blocks]
