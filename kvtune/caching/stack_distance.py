"""LRU stack distances in one pass: the smallest capacity at which each access hits."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

WORD = 64
NEVER = 0
"""Distance of a first access: it hits at no capacity."""


def stack_distances(
    ids: NDArray[np.int64], n_ids: int, offsets: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Stack distance of each access, [n] int64; ``ids`` [n] are dense (0…n_ids-1), all of unit size.

    The distance is the number of distinct ids accessed since the previous access to the same id, itself
    included, so an LRU cache of c slots hits exactly the accesses with 1 ≤ distance ≤ c. ``NEVER`` marks
    first accesses. With ``offsets`` [B + 1], batch b is ids[offsets[b]:offsets[b + 1]], looked up as a whole
    before any of it is touched: its distances are those of the state before the batch.

    Method (after Bennett and Kruskal 1975, and Olken 1981): every access takes the next slot of a time
    axis and its id's previous slot dies; the distance is the number of live slots from that previous slot
    on. Dead slots are bits of 64-bit words under a binary tree whose nodes count the dead below them. One
    climb from the leaf both counts the dead before the slot and adds the new one. When the axis is
    full, the live slots (one an id) move to its front.
    """
    slots = WORD
    while slots < min(len(ids), 2 * n_ids + 8 * WORD):
        slots *= 2
    if offsets is None:
        return _distances(ids, n_ids, slots)
    return _batch_distances(ids, n_ids, slots, offsets)


@njit(cache=True, nogil=True, inline="always")
def _ones(word):
    """Set bits of a uint64 (compiled to one popcount instruction)."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@njit(cache=True, nogil=True)
def _distances(ids, n_ids, slots):
    dead_bits = np.zeros(slots // WORD, np.uint64)
    dead_below = np.zeros(2 * slots // WORD, np.int32)
    slot_of = np.full(n_ids, -1, np.int32)
    id_at = np.empty(slots, np.int32)
    distances = np.empty(len(ids), np.int64)
    now = 0
    dead = 0
    for k in range(len(ids)):
        if now == slots:
            now = _compact(slot_of, id_at, dead_bits, dead_below)
            dead = 0
        slot = slot_of[ids[k]]
        if slot < 0:
            distances[k] = NEVER
        else:
            distances[k] = (now - slot) - (dead - _bury(dead_bits, dead_below, slot))
            dead += 1
        slot_of[ids[k]] = now
        id_at[now] = ids[k]
        now += 1
    return distances


@njit(cache=True, nogil=True)
def _batch_distances(ids, n_ids, slots, offsets):
    dead_bits = np.zeros(slots // WORD, np.uint64)
    dead_below = np.zeros(2 * slots // WORD, np.int32)
    slot_of = np.full(n_ids, -1, np.int32)
    id_at = np.empty(slots, np.int32)
    distances = np.empty(len(ids), np.int64)
    now = 0
    dead = 0
    for batch in range(len(offsets) - 1):
        for k in range(offsets[batch], offsets[batch + 1]):
            slot = slot_of[ids[k]]
            distances[k] = NEVER
            if slot >= 0:
                distances[k] = (now - slot) - (dead - _dead_before(dead_bits, dead_below, slot))
        for k in range(offsets[batch], offsets[batch + 1]):
            if now == slots:
                now = _compact(slot_of, id_at, dead_bits, dead_below)
                dead = 0
            if slot_of[ids[k]] >= 0:
                _bury(dead_bits, dead_below, slot_of[ids[k]])
                dead += 1
            slot_of[ids[k]] = now
            id_at[now] = ids[k]
            now += 1
    return distances


@njit(cache=True, nogil=True, inline="always")
def _dead_before(dead_bits, dead_below, slot):
    """Dead slots before ``slot``."""
    bit = np.uint64(1) << np.uint64(slot & 63)
    count = _ones(dead_bits[slot >> 6] & (bit - np.uint64(1)))
    node = (slot >> 6) + len(dead_bits)
    while node > 1:
        count += (node & 1) * dead_below[node - 1]
        node >>= 1
    return count


@njit(cache=True, nogil=True, inline="always")
def _bury(dead_bits, dead_below, slot):
    """Mark ``slot`` dead; returns how many before it were, counted on the same climb."""
    bit = np.uint64(1) << np.uint64(slot & 63)
    count = _ones(dead_bits[slot >> 6] & (bit - np.uint64(1)))
    dead_bits[slot >> 6] |= bit
    node = (slot >> 6) + len(dead_bits)
    while node > 1:
        count += (node & 1) * dead_below[node - 1]
        dead_below[node] += 1
        node >>= 1
    return count


@njit(cache=True, nogil=True)
def _compact(slot_of, id_at, dead_bits, dead_below):
    """Move the live slots to the front, in order, and forget the dead; returns how many live."""
    dead_bits[:] = 0
    dead_below[:] = 0
    live = 0
    for slot in range(len(id_at)):
        owner = id_at[slot]
        if slot_of[owner] == slot:
            slot_of[owner] = live
            id_at[live] = owner
            live += 1
    return live
