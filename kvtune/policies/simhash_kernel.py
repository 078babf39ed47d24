"""Counting equal bucket numbers on the CPU: one pass over 16-bit integers, which compilers vectorise."""

from __future__ import annotations

import numba


@numba.njit(nogil=True, cache=True)
def count_equal(asked, tables, counts):  # type: ignore[no-untyped-def]
    """Add to counts [T, H, G, n] how many of tables [H, L, n] hold the number asked [T, H, G, L]."""
    steps, heads, group, n_tables = asked.shape
    for t in range(steps):
        for h in range(heads):
            for g in range(group):
                count = counts[t, h, g]
                for table in range(n_tables):
                    row, number = tables[h, table], asked[t, h, g, table]
                    for i in range(len(row)):
                        count[i] += row[i] == number
