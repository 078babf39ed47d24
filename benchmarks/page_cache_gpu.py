"""The page cache of one layer on a GPU: lookup and update in microseconds, fetched pages in GB/s.

Units are kv heads of sequences of about 131,072 tokens: 8,192 ragged clusters of 16 tokens on average,
keys and values of 128 bf16 items in pinned host memory, 147 clusters asked for a step, an execution buffer
of 1,176 pages. A step asks again for a share of the step before and for clusters not asked for in a long
while; the miss share given is the one measured, in pages. Times are of CUDA graphs of 128 different steps;
the fetch is what a graph with it takes beyond one without. Peers: one copy of as many bytes that lie
together in pinned memory (what the bus can do), and the rows gathered by the host, copied and spread on the
device.

Run from the repository root: ``PYTHONPATH=. python benchmarks/page_cache_gpu.py``.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import record as recording
import torch
from torch import Tensor

from kvtune.geometry import PAGE_TOKENS
from kvtune.kernels.fetch import Grid
from kvtune.kernels.page_cache import Lookup
from kvtune.runtime.block_cache import BlockCache
from kvtune.runtime.page_cache import PageCache

DEVICE = "cuda"
DIM, CLUSTERS, RANKS, BUFFER = 128, 8192, 147, 1176
UNITS, CAPACITIES, MISSES, STEPS = (8, 64), (820, 3280), (0.1, 0.5, 1.0), 128
GRIDS = [
    Grid(programs, pages, warps)
    for programs in (64, 128, 256, 512, 1024)
    for pages, warps in ((1, 4), (2, 4), (4, 4), (4, 8))
]
ROW_BYTES = 2 * DIM * 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-sweep", action="store_true", help="leave the launch shapes of the fetch out")
    options = parser.parse_args()
    store = Store(max(UNITS))
    Layer(store, min(UNITS), CAPACITIES[0], 0.5).check(steps=24)
    rows = []
    for units in UNITS:
        for capacity in CAPACITIES:
            for share in MISSES:
                rows += Layer(store, units, capacity, share).measure()
        if not options.no_sweep:
            Layer(store, units, CAPACITIES[0], 1.0).sweep()
    if out := os.environ.get("OUT"):
        recording.RESULTS = Path(out)
    path = recording.record(rows, "page_cache_gpu")
    print(recording.table(rows))
    print(f"wrote {path}")


class Store:
    """Keys and values of all units in pinned memory, and how their clusters divide them."""

    def __init__(self, units: int) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = torch.randint(4, 29, (units, CLUSTERS), generator=generator)
        self.sizes = sizes.to(DEVICE)
        self.offsets = torch.zeros(units, CLUSTERS + 1, dtype=torch.int32, device=DEVICE)
        self.offsets[:, 1:] = self.sizes.cumsum(1)
        rows = int(self.offsets[:, -1].max())
        pattern = torch.randint(-30000, 30000, (rows, DIM), generator=generator, dtype=torch.int16)
        self.keys, self.values = (self._pinned(units, rows) for _ in range(2))
        for unit in range(units):
            self.keys[unit] = (pattern + unit).view(torch.bfloat16)
            self.values[unit] = (pattern - unit - 1000).view(torch.bfloat16)

    @staticmethod
    def _pinned(units: int, rows: int) -> Tensor:
        return torch.empty(units, rows, DIM, dtype=torch.bfloat16, pin_memory=DEVICE == "cuda")


class Layer:
    """A page cache over the first units of a store, its pool, and the clusters that each step asks for."""

    def __init__(self, store: Store, units: int, capacity: int, share: float) -> None:
        self.units, self.capacity, self.share = units, capacity, share
        self.sizes, self.offsets = store.sizes[:units], store.offsets[:units]
        self.cache = PageCache(units, capacity, BUFFER, CLUSTERS, CLUSTERS * 5, RANKS, DEVICE)
        self.cache.set_clusters(self.sizes)
        self.keys, self.values = store.keys[:units], store.values[:units]
        pool = (units, self.cache.slots * PAGE_TOKENS, DIM)
        self.pools = [torch.zeros(pool, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        self.retrieved = self._retrieved()

    def _retrieved(self) -> Tensor:
        """[steps, U, R]: of each step, ``share`` of the clusters are the next ones of a long round.

        Eight units differ; the others follow them, each over clusters of its own.
        """
        generator = torch.Generator().manual_seed(1)
        fresh = max(round(self.share * RANKS), 1)
        asked = torch.empty(STEPS, min(self.units, 8), RANKS, dtype=torch.int32)
        for unit in range(asked.shape[1]):
            turns = torch.randperm(CLUSTERS, generator=generator).int()
            before, at = turns[-RANKS:], 0
            for step in range(STEPS):
                keep = before[torch.randperm(RANKS, generator=generator)[: RANKS - fresh]]
                new = turns[~torch.isin(turns, keep)]
                new = new[(at + torch.arange(fresh)) % len(new)]
                at = (at + fresh) % (CLUSTERS - RANKS)
                before = torch.cat([keep, new])[torch.randperm(RANKS, generator=generator)]
                asked[step, unit] = before
        return asked[:, torch.arange(self.units) % 8].to(DEVICE)

    def step(self, step: int, fetch: bool = True) -> None:
        found = self.cache.lookup(self.retrieved[step], self.offsets)
        if fetch:
            self.cache.fetch(found, self.keys, self.values, *self.pools)
        self.cache.update(found)

    # Checks

    def check(self, steps: int) -> None:
        """Hits are the live block cache's, and every row found holds the store's bits."""
        slow = [BlockCache(self.capacity) for _ in range(self.units)]
        for step in range(steps):
            found = self.cache.lookup(self.retrieved[step], self.offsets)
            self.cache.fetch(found, self.keys, self.values, *self.pools)
            for unit, cache in enumerate(slow):
                clusters = self.retrieved[step, unit].tolist()
                tokens = self.sizes[unit, clusters].tolist()
                pages = [-(-count // PAGE_TOKENS) for count in tokens]
                assert found.hits[unit].tolist() == cache.access(clusters, pages, tokens), "wrong hits"
                cache.update()
                self._check_rows(unit, clusters, found.rows[unit, : found.n_rows[unit]])
            self.cache.update(found)
        counters = self.cache.counters().tolist()
        for unit, cache in enumerate(slow):
            counted = cache.counters
            assert counters[unit] == [counted.requests, counted.pages, counted.tokens], "wrong counters"
        print(f"check: {steps} steps of {self.units} units follow the block cache, data included")

    def _check_rows(self, unit: int, clusters: list[int], rows: Tensor) -> None:
        offsets = self.offsets[unit].tolist()
        stored = [row for cluster in clusters for row in range(offsets[cluster], offsets[cluster + 1])]
        for host, pool in zip((self.keys, self.values), self.pools):
            got = pool[unit, rows.long()].view(torch.int16).cpu()
            assert torch.equal(got, host[unit, stored].view(torch.int16)), "wrong data"

    # Measurements

    def measure(self) -> list[dict[str, Any]]:
        bare = self._graph_seconds(fetch=False)
        pages, missing, tokens = self._missing_in_a_round()
        whole = self._graph_seconds(fetch=True)
        found = self._typical_lookup()
        alone = self._fetch_seconds(None)
        moved = int(found.fetch_counts[self._listed()].sum()) * ROW_BYTES
        gathered = self._host_gather_seconds()
        copied = self._copy_seconds(moved)
        self.cache.update(found)
        wanted = tokens * ROW_BYTES / STEPS
        rate = wanted / max(whole - bare, 1e-9) / 1e9
        bus, gather = moved / copied / 1e9, moved / gathered / 1e9
        common = {
            "units": self.units, "capacity_pages": self.capacity, "buffer_pages": BUFFER, "ranks": RANKS,
            "miss_share": missing / pages, "bytes_a_step": round(wanted), "step_us": whole * 1e6,
            "fetch_alone_gb_s": moved / alone / 1e9,
        }  # fmt: skip
        label = f"U={self.units} capacity={self.capacity} miss={missing / pages:.0%}"
        return [
            _row(f"page_cache_lookup_update {label}", bare * 1e6, "us", None, None, common),
            _row(f"page_cache_fetch {label}", rate, "GB/s", "one pinned copy", bus, common),
            _row(f"page_cache_fetch {label}", rate, "GB/s", "gather on the host", gather, common),
        ]

    def sweep(self) -> None:
        found = self._typical_lookup()
        moved = int(found.fetch_counts[self._listed()].sum()) * ROW_BYTES
        print(f"fetch of {moved / 1e6:.1f} MB, {self.units} units; programs, pages, warps:  GB/s")
        for grid in GRIDS:
            rate = moved / self._fetch_seconds(grid) / 1e9
            print(f"  {grid.programs:5d} {grid.pages:2d} {grid.warps:2d}:  {rate:.1f}", flush=True)
        print(f"  one pinned copy: {moved / self._copy_seconds(moved) / 1e9:.1f}")
        self.cache.update(found)

    def _graph_seconds(self, fetch: bool) -> float:
        """Seconds a step, in a graph of all steps that is replayed once to fill the cache."""
        graph = _captured(lambda: [self.step(step, fetch) for step in range(STEPS)], self.step)
        return _device_seconds(graph.replay, repeats=7) / STEPS

    def _missing_in_a_round(self) -> tuple[int, int, int]:
        """Pages asked for, pages missing and tokens missing in one round of all steps."""
        before = self.cache.counters()
        for step in range(STEPS):
            self.step(step)
        hits, asked = (self.cache.counters() - before).sum(0).unbind(1)
        return int(asked[1]), int(asked[1] - hits[1]), int(asked[2] - hits[2])

    def _typical_lookup(self) -> Lookup:
        """A lookup, without its update, after steps enough for the first one's misses to be forgotten."""
        for step in range(STEPS // 2):
            self.step(step)
        return self.cache.lookup(self.retrieved[STEPS // 2], self.offsets)

    def _listed(self) -> Tensor:
        """Which entries of the fetch lists count, [U, F]."""
        found = self.cache.found
        return torch.arange(BUFFER, device=DEVICE) < found.n_fetch[:, None]

    def _fetch_seconds(self, grid: Grid | None) -> float:
        """One fetch of what the lookup found missing; repeated, so that the host's cache may help it."""

        def fetch() -> None:
            self.cache.fetch(self.cache.found, self.keys, self.values, *self.pools, grid)

        graph = _captured(lambda: [fetch() for _ in range(8)], lambda *_: fetch())
        return _device_seconds(graph.replay, repeats=5) / 8

    def _copy_seconds(self, size: int) -> float:
        source = torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=DEVICE)
        return _device_seconds(lambda: target.copy_(source, non_blocking=True), repeats=7)

    def _host_gather_seconds(self) -> float:
        """Wall clock: lists to the host, rows gathered into pinned memory, copied, spread over the pool."""
        hosts, pools = ([t.flatten(0, 1) for t in pair] for pair in ((self.keys, self.values), self.pools))
        staging = torch.empty(self.units * BUFFER * PAGE_TOKENS, DIM, dtype=torch.bfloat16, pin_memory=True)
        found = self.cache.found
        within = torch.arange(PAGE_TOKENS)
        unit = torch.arange(self.units)[:, None, None]

        def fetch() -> None:
            first, slot, count, n = (
                t.cpu() for t in (found.fetch_rows, found.fetch_slots, found.fetch_counts, found.n_fetch)
            )
            inside = (torch.arange(BUFFER) < n[:, None])[..., None] & (within < count[..., None])
            source = (unit * self.keys.shape[1] + first[..., None] + within)[inside]
            target = (unit * self.pools[0].shape[1] + slot[..., None] * 8 + within)[inside].to(DEVICE)
            part = staging[: len(source)]
            for host, pool in zip(hosts, pools):
                torch.index_select(host, 0, source, out=part)
                pool.index_copy_(0, target, part.to(DEVICE, non_blocking=True))
                torch.cuda.synchronize()

        fetch()
        times = []
        for _ in range(3):
            start = perf_counter()
            fetch()
            times.append(perf_counter() - start)
        return min(times)


def _captured(body: Callable[[], object], warm_up: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    """``body`` as a graph; ``warm_up`` compiles its kernels before."""
    warm_up(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    return graph


def _device_seconds(body: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call between device events."""
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        body()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def _row(
    name: str, value: float, unit: str, peer: str | None, peer_value: float | None, extra: dict[str, Any]
) -> dict[str, Any]:
    ratio = value / peer_value if peer_value else None
    return {
        "name": name, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value, "ratio": ratio,
        **extra,
    }  # fmt: skip


if __name__ == "__main__":
    main()
