"""The new token of every unit joins the stored keys and values, and the resident range moves on."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtune.kernels.tiles import padded

UNBOUNDED = 1 << 30
"""A window that never cuts anything."""


def append(
    keys: Tensor,
    values: Tensor,
    stored_keys: Tensor,
    stored_values: Tensor,
    resident: Tensor,
    sink: int = 0,
    window: int = UNBOUNDED,
) -> None:
    """Write keys [U, d] and values [U, dv] at row ``resident[:, 3]`` of the stored ones; add 1 to it.

    Stored are keys [U, N, d] and values [U, N, dv]; resident [U, 4] int32 is as in
    :class:`kvtune.kernels.attend.Rows`. A ``window`` moves the start of the second range along, so that it
    holds the last ``window`` rows; the first ``sink`` rows that it leaves behind form the first range.
    """
    units, dim = keys.shape
    width = values.shape[1]
    _append_kernel[(units,)](
        keys, values, stored_keys, stored_values, resident, stored_keys.stride(0), stored_values.stride(0),
        dim, width, sink, window,
        DIM=padded(dim), WIDTH=padded(width), BOUNDED=window < UNBOUNDED, num_warps=1,
    )  # fmt: skip


@triton.jit
def write_token(
    keys, values, stored_keys, stored_values, unit, row, key_stride, value_stride, dim, width,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the new token of ``unit`` at ``row`` of what is stored; returns its key [DIM]."""
    channel, column = tl.arange(0, DIM), tl.arange(0, WIDTH)
    key = tl.load(keys + unit * dim + channel, mask=channel < dim)
    tl.store(stored_keys + unit * key_stride + row.to(tl.int64) * dim + channel, key, mask=channel < dim)
    value = tl.load(values + unit * width + column, mask=column < width)
    at = unit * value_stride + row.to(tl.int64) * width + column
    tl.store(stored_values + at, value, mask=column < width)
    return key


@triton.jit
def _append_kernel(
    keys, values, stored_keys, stored_values, resident, key_stride, value_stride, dim, width, sink, window,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    row = tl.load(resident + unit * 4 + 3)
    write_token(
        keys, values, stored_keys, stored_values, unit, row, key_stride, value_stride, dim, width, DIM, WIDTH
    )
    tl.store(resident + unit * 4 + 3, row + 1)
    if BOUNDED:
        start = tl.maximum(row + 1 - window, 0)
        tl.store(resident + unit * 4 + 1, tl.minimum(start, sink))
        tl.store(resident + unit * 4 + 2, start)
