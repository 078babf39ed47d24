"""The page cache of a layer on the device: RetroInfer's wave buffer over a pool of page slots.

A **unit** is one kv head of one sequence. Its clusters lie in a host store sorted by cluster, page i of a
cluster being its rows 8·i … 8·i + 7; its pool has a slot for every page that may be resident and for every
page that one step may fetch. Nothing here waits for the device but :meth:`PageCache.set_clusters`, and
every buffer stays where it is, so a step can be recorded in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import fields

import torch
import triton
from torch import Tensor

from kvtune.errors import InputError
from kvtune.geometry import PAGE_TOKENS
from kvtune.kernels.fetch import Grid, fetch_pages
from kvtune.kernels.page_cache import Lookup, PageState, look_up, update


class PageCache:
    """U units with room for ``capacity`` resident pages each, and ``buffer_pages`` more for a step's misses.

    A step is ``lookup``, ``fetch``, attention over the rows found, ``update``. The update may run beside
    the fetch and the attention, on another stream; the layer's next lookup must wait for it. Every lookup
    needs its update. Behaviour and counters are those of ``block_cache.BlockCache``.

    n_clusters_max and n_pages_max bound what an index may grow to in one unit; max_retrieved is R, the
    clusters that a step asks for. Raises ``InputError`` where a number is below 1.
    """

    def __init__(
        self,
        units: int,
        capacity: int,
        buffer_pages: int,
        n_clusters_max: int,
        n_pages_max: int,
        max_retrieved: int,
        device: torch.device | str,
    ) -> None:
        given = {
            "units": units, "capacity": capacity, "buffer_pages": buffer_pages,
            "n_clusters_max": n_clusters_max, "n_pages_max": n_pages_max, "max_retrieved": max_retrieved,
        }  # fmt: skip
        for name, number in given.items():
            if number < 1:
                raise InputError(f"a page cache needs {name} of at least 1, not {number}")
        self.units, self.capacity, self.buffer_pages = units, capacity, buffer_pages
        self.n_clusters = 0
        ranks = triton.next_power_of_2(max_retrieved)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(units, *shape, dtype=dtype, device=device)

        self.state = PageState(
            capacity=capacity,
            buffer_pages=buffer_pages,
            page_offsets=empty(n_clusters_max + 1),
            page_slot=empty(n_pages_max),
            free=empty(self.slots),
            n_free=empty(),
            order=empty(capacity),
            n_resident=empty(),
            used=empty(),
            seen=empty(n_clusters_max),
            step=empty(),
            counters=empty(3, 2, dtype=torch.int64),
            plan=empty(6, ranks),
            gone=empty(2, capacity + ranks),
        )
        self.found = Lookup(
            retrieved=empty(max_retrieved),
            hits=empty(max_retrieved, dtype=torch.int8),
            n_kept=empty(),
            fetch_rows=empty(buffer_pages),
            fetch_slots=empty(buffer_pages),
            fetch_counts=empty(buffer_pages),
            n_fetch=empty(),
            rows=empty(buffer_pages * PAGE_TOKENS),
            n_rows=empty(),
        )
        self.reset()

    @property
    def slots(self) -> int:
        """Page slots of a unit's pool, P; the cache writes the first 8 · P of the pool's rows."""
        return self.capacity + self.buffer_pages

    @property
    def device_bytes(self) -> int:
        """Bytes of the state and of a lookup's buffers; the pool is the caller's."""
        held = [getattr(part, field.name) for part in (self.state, self.found) for field in fields(part)]
        return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))

    def reset(self) -> None:
        """Forget clusters, residents and counters."""
        state = self.state
        for tensor in (state.page_offsets, state.n_resident, state.used, state.seen, state.step):
            tensor.zero_()
        state.counters.zero_()
        state.page_slot.fill_(-1)
        state.free.copy_(torch.arange(self.slots, dtype=torch.int32, device=state.free.device))
        state.n_free.fill_(self.slots)
        self.found.n_kept.zero_()
        self.n_clusters = 0

    def set_clusters(self, sizes: Tensor) -> None:
        """Say how many tokens each cluster has: sizes [U, C], any integer type, zero where there is none.

        Called again when the index has grown: clusters that had tokens keep their number and their size,
        and stay resident. Waits for the device. Raises ``InputError`` where clusters or pages exceed the
        maxima, or a cluster that was set has moved.
        """
        state, count = self.state, sizes.shape[1]
        if sizes.shape[0] != self.units or not self.n_clusters <= count < state.page_offsets.shape[1]:
            raise InputError(
                f"a page cache of {self.units} units, now with {self.n_clusters} clusters of at most "
                f"{state.page_offsets.shape[1] - 1}, cannot take cluster sizes {list(sizes.shape)}"
            )
        if not count:
            return
        pages = (sizes.to(state.page_offsets.device) + PAGE_TOKENS - 1) // PAGE_TOKENS
        ends = pages.cumsum(1)
        n_pages, moved = torch.stack([ends.max(), self._moved(pages, ends).sum()]).tolist()
        if n_pages > state.page_slot.shape[1]:
            raise InputError(f"{n_pages} pages in a unit exceed the maximum of {state.page_slot.shape[1]}")
        if moved:
            raise InputError(f"{moved} clusters that the page cache already has have moved or changed size")
        state.page_offsets[:, 1 : count + 1] = ends
        self.n_clusters = count

    def _moved(self, pages: Tensor, ends: Tensor) -> Tensor:
        """Which of the clusters set before are at other pages now, [U, n_clusters] bool."""
        old = self.state.page_offsets[:, : self.n_clusters + 1]
        held = old.diff(dim=1)
        here = slice(self.n_clusters)
        return (held > 0) & ((ends[:, here] != old[:, 1:]) | (pages[:, here] != held))

    def lookup(self, retrieved: Tensor, offsets: Tensor) -> Lookup:
        """Look the step's clusters up, and give the pages of those that are missing slots.

        retrieved [U, R] int32 with R = max_retrieved: distinct clusters with tokens in rank order, then -1;
        those beyond ``buffer_pages`` pages in all are left out. It must stay as it is until the update.
        offsets [U, ≥ C + 1], int32 or int64: host rows of cluster c are offsets[c] … offsets[c + 1] - 1.
        The answer's buffers are the cache's own: they hold until the next lookup.
        """
        wanted = tuple(self.found.hits.shape)
        if tuple(retrieved.shape) != wanted or retrieved.dtype != torch.int32 or retrieved.stride(1) != 1:
            raise InputError(f"retrieved clusters must be int32 {wanted}, not {_described(retrieved)}")
        if len(offsets) != self.units or offsets.shape[1] <= self.n_clusters or offsets.stride(1) != 1:
            raise InputError(f"{self.n_clusters} clusters need one offset more, not {_described(offsets)}")
        self.found.retrieved = retrieved
        look_up(self.state, offsets, self.found)
        return self.found

    def fetch(
        self,
        found: Lookup,
        host_keys: Tensor,
        host_values: Tensor,
        pool_keys: Tensor,
        pool_values: Tensor,
        grid: Grid | None = None,
    ) -> None:
        """Copy the missing pages to their slots: keys [U, M, d] and values [U, M, dv] to [U, ≥ 8·P, …].

        The host's tensors must be pinned where the pool is on a GPU. Raises ``InputError`` where they are
        not, or where shapes or dtypes do not fit.
        """
        for host, pool in ((host_keys, pool_keys), (host_values, pool_values)):
            same = host.dtype == pool.dtype and host.shape[2] == pool.shape[2]
            if not same or host.stride(2) != 1 or pool.stride(2) != 1:
                raise InputError(f"host rows {_described(host)} do not fit pool rows {_described(pool)}")
            if len(host) != self.units or len(pool) != self.units:
                raise InputError(f"a cache of {self.units} units has no use for {_described(host)}")
            if pool.shape[1] < self.slots * PAGE_TOKENS:
                raise InputError(f"{self.slots} slots need 8 pool rows each, not {_described(pool)}")
            if pool.is_cuda and not host.is_cuda and not host.is_pinned():
                raise InputError("a GPU reads the host's keys and values only from pinned memory")
        fetch_pages(found, host_keys, host_values, pool_keys, pool_values, grid)

    def update(self, found: Lookup) -> None:
        """Bring the cache up to date with the step of ``found``; slots given back serve the next lookup."""
        update(self.state, found)

    def counters(self) -> Tensor:
        """A copy of the counts, [U, 3, 2] int64: of requests, pages and tokens, [hits, asked]."""
        return self.state.counters.clone()


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
