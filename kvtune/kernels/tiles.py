"""Tile sizes that the kernels of a decode step share."""

from __future__ import annotations

import triton

ROWS = 16
"""Query heads of a group are padded to the fewest rows that a tensor core takes."""


def padded(size: int) -> int:
    """The power of two that holds ``size``, at least 16."""
    return max(16, triton.next_power_of_2(size))
