"""Missing pages straight from the host store into their slots, in one kernel without the host's help.

The device reads pinned host memory over the bus itself (zero copy): 16 bytes a thread, a page of keys and
its values in flight at once. A few hundred pages in flight fill the bus, so programs stride over the
pages; a fixed grid then serves a step that misses little as well as one that misses everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kvtune.kernels.page_cache import Lookup


@dataclass(frozen=True)
class Grid:
    """Launch shape: programs over all units, pages that each moves at a time, warps of each."""

    programs: int = 256
    pages: int = 2
    warps: int = 4


def fetch_pages(
    found: Lookup,
    host_keys: Tensor,
    host_values: Tensor,
    pool_keys: Tensor,
    pool_values: Tensor,
    grid: Grid | None = None,
) -> None:
    """Copy the pages that ``found`` lists; rows that a page lacks stay as they were.

    host_keys [U, M, d] and host_values [U, M, dv]: pinned if the pool is on a GPU; pool_keys [U, ≥ 8·P, d]
    and pool_values [U, ≥ 8·P, dv]. All of one dtype, rows contiguous in the last dimension only.
    """
    grid = grid or Grid()
    units, listed = found.fetch_rows.shape
    programs = min(triton.cdiv(grid.programs, units), triton.cdiv(listed, grid.pages))
    key_dim, value_dim = host_keys.shape[2], host_values.shape[2]
    _fetch_kernel[(programs, units)](
        host_keys, host_values, pool_keys, pool_values,
        found.fetch_rows, found.fetch_slots, found.fetch_counts, found.n_fetch, listed,
        host_keys.stride(0), host_keys.stride(1), host_values.stride(0), host_values.stride(1),
        pool_keys.stride(0), pool_keys.stride(1), pool_values.stride(0), pool_values.stride(1),
        key_dim, value_dim,
        KEY=triton.next_power_of_2(key_dim), VALUE=triton.next_power_of_2(value_dim), PAGES=grid.pages,
        num_warps=grid.warps,
    )  # fmt: skip


@triton.jit
def _fetch_kernel(
    host_keys, host_values, pool_keys, pool_values, rows, slots, counts, n_fetch, listed,
    host_key_unit, host_key_row, host_value_unit, host_value_row,
    pool_key_unit, pool_key_row, pool_value_unit, pool_value_row, key_dim, value_dim,
    KEY: tl.constexpr, VALUE: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    missing = tl.load(n_fetch + unit)
    lane = tl.arange(0, PAGES * 8)
    key_columns, value_columns = tl.arange(0, KEY)[None, :], tl.arange(0, VALUE)[None, :]
    for begin in tl.range(tl.program_id(0) * PAGES, missing, tl.num_programs(0) * PAGES):
        page = begin + lane // 8
        at = unit * listed + page
        within = lane % 8
        inside = (within < tl.load(counts + at, mask=page < missing, other=0))[:, None]
        source = (tl.load(rows + at, mask=page < missing, other=0) + within).to(tl.int64)[:, None]
        target = (tl.load(slots + at, mask=page < missing, other=0) * 8 + within).to(tl.int64)[:, None]
        keys = tl.load(
            host_keys + unit * host_key_unit + source * host_key_row + key_columns,
            mask=inside & (key_columns < key_dim),
        )
        values = tl.load(
            host_values + unit * host_value_unit + source * host_value_row + value_columns,
            mask=inside & (value_columns < value_dim),
        )
        tl.store(
            pool_keys + unit * pool_key_unit + target * pool_key_row + key_columns,
            keys,
            mask=inside & (key_columns < key_dim),
        )
        tl.store(
            pool_values + unit * pool_value_unit + target * pool_value_row + value_columns,
            values,
            mask=inside & (value_columns < value_dim),
        )
