"""Missing pages to their slots: exactly the listed rows, bit by bit, and nothing else."""

from __future__ import annotations

import pytest
import torch

from kvtune.errors import InputError

pytest.importorskip("triton")
from kvtune.kernels.fetch import Grid, fetch_pages
from kvtune.runtime.page_cache import PageCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNITS, SLOTS, ROWS, LISTED = 2, 9, 80, 7
PAGES = [[(3, 4, 8), (40, 0, 1), (72, 8, 8), (11, 7, 5), (0, 2, 7)], [(20, 6, 3)]]
"""Of each unit: first host row, slot, rows."""


def listed():
    """A lookup's fetch lists; what lies beyond their ends would be out of bounds."""
    found = PageCache(UNITS, SLOTS - LISTED, LISTED, 1, 1, 1, DEVICE).found
    for name in ("fetch_rows", "fetch_slots", "fetch_counts"):
        getattr(found, name).fill_(2**30)
    for unit, pages in enumerate(PAGES):
        for k, (row, slot, count) in enumerate(pages):
            found.fetch_rows[unit, k], found.fetch_slots[unit, k] = row, slot
            found.fetch_counts[unit, k] = count
        found.n_fetch[unit] = len(pages)
    return found


def numbered(rows, dim, dtype, start):
    """Bit patterns that all differ, also in 8 bits a neighbour."""
    bits = torch.arange(UNITS * rows * dim, dtype=torch.int64) * 37 + start
    kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return (bits % 0x7F00).to(kind).view(dtype).view(UNITS, rows, dim)


def on_host(tensor):
    return tensor.pin_memory() if DEVICE == "cuda" else tensor


@pytest.mark.parametrize("grid", [Grid(), Grid(programs=2, pages=1), Grid(programs=4, pages=4, warps=8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_listed_rows_arrive_and_others_stay(grid, dtype):
    keys, values = on_host(numbered(ROWS, 16, dtype, 1)), on_host(numbered(ROWS, 12, dtype, 5))
    # Rows of the pool have other things behind them, and there are more rows than slots need.
    pools = [numbered(SLOTS * 8 + 5, width, dtype, 9).to(DEVICE) for width in (24, 12)]
    want = [pool.cpu().clone() for pool in pools]
    for unit, pages in enumerate(PAGES):
        for row, slot, count in pages:
            want[0][unit, slot * 8 : slot * 8 + count, :16] = keys[unit, row : row + count]
            want[1][unit, slot * 8 : slot * 8 + count] = values[unit, row : row + count]
    fetch_pages(listed(), keys, values, pools[0][:, :, :16], pools[1], grid)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for pool, expected in zip(pools, want):
        assert torch.equal(pool.cpu().view(integers), expected.view(integers))


def test_nothing_missing_moves_nothing():
    found = listed()
    found.n_fetch.zero_()
    pool = torch.full((UNITS, SLOTS * 8, 8), 2.0, device=DEVICE)
    host = on_host(torch.ones(UNITS, ROWS, 8))
    fetch_pages(found, host, host, pool, pool)
    assert (pool == 2).all()


def test_tensors_that_do_not_fit_are_refused():
    cache = PageCache(UNITS, SLOTS - LISTED, LISTED, 1, 1, 1, DEVICE)
    host = on_host(torch.ones(UNITS, ROWS, 8))
    pool = torch.ones(UNITS, SLOTS * 8, 8, device=DEVICE)
    for keys, target, message in [
        (host.half(), pool, "do not fit pool rows"),
        (host[:, :, :4], pool, "do not fit pool rows"),
        (host[:1], pool, "of 2 units has no use"),
        (host, pool[:, 1:], "9 slots need 8 pool rows each"),
    ]:
        with pytest.raises(InputError, match=message):
            cache.fetch(cache.found, keys, host, target, pool)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_gpu_refuses_memory_that_is_not_pinned():
    cache = PageCache(1, 2, 2, 1, 1, 1, DEVICE)
    pool = torch.ones(1, 32, 8, device=DEVICE)
    with pytest.raises(InputError, match="pinned"):
        cache.fetch(cache.found, torch.ones(1, 8, 8), torch.ones(1, 8, 8), pool, pool)
