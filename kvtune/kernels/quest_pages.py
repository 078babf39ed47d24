"""Quest's pages while decoding: the new token joins its page, whose bounds follow (arXiv 2406.10774)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtune.kernels.append import write_token
from kvtune.kernels.tiles import padded


def append_to_page(
    keys: Tensor,
    values: Tensor,
    stored_keys: Tensor,
    stored_values: Tensor,
    low: Tensor,
    high: Tensor,
    resident: Tensor,
    visible: Tensor,
    plan: Tensor,
    page_size: int,
) -> None:
    """Write keys [U, d] and values [U, dv] at row ``resident[:, 3]`` of the stored ones; add 1 to it.

    Stored are keys [U, N, d] and values [U, N, dv]; row r lies in page r // ``page_size``. The bounds low and
    high [U, P, d] of that page, the own one, take the key in. The resident rows become those of the own page;
    ``visible`` [U] and the first column of ``plan`` [U, 4] (int32) the pages before it.
    """
    units, dim = keys.shape
    width = values.shape[1]
    _page_kernel[(units,)](
        keys, values, stored_keys, stored_values, low, high, resident, visible, plan,
        stored_keys.stride(0), stored_values.stride(0), low.stride(0), page_size, dim, width,
        DIM=padded(dim), WIDTH=padded(width), num_warps=1,
    )  # fmt: skip


@triton.jit
def _page_kernel(
    keys, values, stored_keys, stored_values, low, high, resident, visible, plan,
    key_stride, value_stride, bound_stride, page_size, dim, width, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64)
    row = tl.load(resident + unit * 4 + 3)
    key = write_token(
        keys, values, stored_keys, stored_values, unit, row, key_stride, value_stride, dim, width, DIM, WIDTH
    ).to(tl.float32)
    own = row // page_size
    channel = tl.arange(0, DIM)
    at = unit * bound_stride + own.to(tl.int64) * dim + channel
    begins = row % page_size == 0  # what is stored there is of no page
    least = tl.load(low + at, mask=channel < dim, other=0.0).to(tl.float32)
    most = tl.load(high + at, mask=channel < dim, other=0.0).to(tl.float32)
    least = tl.where(begins, key, tl.minimum(key, least))
    most = tl.where(begins, key, tl.maximum(key, most))
    tl.store(low + at, least.to(low.dtype.element_ty), mask=channel < dim)
    tl.store(high + at, most.to(high.dtype.element_ty), mask=channel < dim)
    tl.store(resident + unit * 4 + 2, own * page_size)
    tl.store(resident + unit * 4 + 3, row + 1)
    tl.store(visible + unit, own)
    tl.store(plan + unit * 4, own)
