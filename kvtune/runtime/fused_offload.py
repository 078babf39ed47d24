"""The wave index with keys and values in host memory: a page cache on the GPU, misses fetched page by page.

RetroInfer's wave buffer (arXiv 2505.02922), with no copying on the GPU: a miss is fetched into a free slot
of the pool and attended there, and admitting it only changes who owns the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvtune.caching import capacity_pages
from kvtune.geometry import PAGE_TOKENS, LayerInfo
from kvtune.kernels.attend import Rows, side_stream
from kvtune.kernels.choose import cut
from kvtune.policies.wave_index import WaveIndex
from kvtune.runtime.fused_layer import LayerStore, nbytes
from kvtune.runtime.fused_wave import SEGMENT, FusedWave
from kvtune.runtime.page_cache import PageCache
from kvtune.runtime.step_log import StepLog


class FusedWaveOffload(FusedWave):
    """One layer of B sequences under a wave index whose clusters lie in pinned host memory.

    A unit's pool on the GPU holds its page slots, then its sinks and the dense tail. ``cache_fraction`` sizes
    the page cache by the longest prompt.
    """

    def __init__(self, info: LayerInfo, policy: WaveIndex, new_tokens: int, cache_fraction: float) -> None:
        super().__init__(info, policy, new_tokens)
        self.cache_fraction = cache_fraction

    def room(self, lengths: Sequence[int], new_tokens: int) -> int:
        return max(lengths)  # for the prompts alone: what follows goes to the pool

    def _allocate(self, store: LayerStore) -> None:
        units, device, dtype, info = len(store.keys), store.keys.device, store.keys.dtype, self.info
        rows = max(state.order.shape[1] for state in self.states) + self.grown * SEGMENT
        self.host_keys = _pinned(units, max(rows, 1), info.head_dim, dtype, device)
        self.host_values = _pinned(units, max(rows, 1), info.value_dim, dtype, device)
        capacity = capacity_pages(self.cache_fraction, max(self.prompts))
        n_clusters = self.sizes.shape[1]
        self.cache = PageCache(
            units, capacity, self.buffer_pages, n_clusters,
            rows // PAGE_TOKENS + n_clusters, self.choice.retrieved.shape[1], device,
        )  # fmt: skip
        self.steady = self.cache.slots * PAGE_TOKENS
        tails = [n - state.tail_start for n, state in zip(self.prompts, self.states)]
        steady = self.policy.sink + max(tails) + self.new_tokens + 1
        self.whole, lengths = store, list(store.lengths)
        self.store = LayerStore.empty(info, len(lengths), self.steady + steady, dtype, device)
        self.store.lengths = lengths
        for sequence, state in enumerate(self.states):
            for begin, end, row in (
                (0, state.sink, self.steady),
                (state.tail_start, lengths[sequence], self.steady + state.sink),
            ):
                keys, values = (part[:, begin:end] for part in store.of(sequence))
                self.store.put(sequence, row, keys, values)
        self.side = side_stream(device, 1)

    def build(self, store: LayerStore, prompt_queries: list[Tensor] | None = None) -> None:
        super().build(store, prompt_queries)
        del self.whole

    def finish(self) -> None:
        self._fill_cache()

    def _put_clusters(self, sequence: int, rows: Tensor, first: int, grown: int) -> int:
        source = self.store if grown else self.whole
        units, n = self.store.units(sequence), rows.shape[1]
        first = int(self.offsets[units.start, self.clusters[sequence]]) if grown else 0
        for kept, host in ((source.keys, self.host_keys), (source.values, self.host_values)):
            wanted = rows[..., None].expand(-1, -1, kept.shape[2])
            sorted_rows = torch.gather(kept[units], 1, wanted)
            for unit, row in enumerate(sorted_rows, units.start):  # one run of host memory each
                # Only the device reads these rows, on streams that wait for this one.
                host[unit, first : first + n].copy_(row, non_blocking=True)
        return first

    def _tail_rows(self, sequence: int) -> tuple[int, int]:
        state = self.states[sequence]
        return self.steady, self.steady + state.sink - state.prompt_end

    def _grow(self, sequence: int, state: Any) -> None:
        super()._grow(sequence, state)
        self.cache.set_clusters(self.sizes[:, : max(self.clusters)])

    def extend(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        self.store.put(sequence, self._row(sequence, self.store.lengths[sequence]), keys, values)
        self.store.lengths[sequence] += keys.shape[1]
        self.settle()

    def made(self, sequence: int, start: int) -> tuple[Tensor, Tensor]:
        units = self.store.units(sequence)
        rows = slice(self._row(sequence, start), self._row(sequence, self.store.lengths[sequence]))
        return self.store.keys[units, rows], self.store.values[units, rows]

    def _row(self, sequence: int, position: int) -> int:
        return position + self._tail_rows(sequence)[1]

    def rewind(self, mark: Any) -> None:
        super().rewind(mark)
        self._fill_cache()

    def _fill_cache(self) -> None:
        """An empty page cache that knows the clusters there are."""
        self.cache.reset()
        for sequence, count in enumerate(self.clusters):  # forget what was grown after a mark
            self.sizes[self.store.units(sequence), count:] = 0
        self.cache.set_clusters(self.sizes[:, : max(self.clusters)])

    def _retrieve(self) -> Rows:
        cut(self.choice, self.sizes, self.plan)
        found = self.cache.lookup(self.choice.retrieved, self.offsets)
        if self.side is None:
            self.cache.update(found)
        else:  # beside the fetch and the attention, until join()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                self.cache.update(found)
        self.cache.fetch(found, self.host_keys, self.host_values, self.store.keys, self.store.values)
        if self.log is not None:
            self.log.note(self.choice.retrieved, self.choice.truncated, found.hits)
        return Rows(self.resident, found.rows, found.n_rows, self.rows.longest)

    def join(self) -> None:
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    def new_log(self, at: Tensor, steps: int) -> StepLog:
        return StepLog.empty(at, steps, self.choice.retrieved.shape, self.sizes, cached=True)

    def gpu_bytes(self) -> dict[str, int]:
        held = super().gpu_bytes()
        row = nbytes(self.store.keys[:1, :1], self.store.values[:1, :1]) * len(self.store.keys)
        slots = self.cache.capacity * PAGE_TOKENS * row
        buffer = self.cache.buffer_pages * PAGE_TOKENS * row
        held["kv"] -= slots + buffer
        return {**held, "cache": slots, "buffers": held["buffers"] + buffer + self.cache.device_bytes}

    def host_bytes(self) -> int:
        return nbytes(self.host_keys, self.host_values)


def _pinned(units: int, rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory [U, rows, dim]; pinned where a GPU is to read it."""
    return torch.empty(units, rows, dim, dtype=dtype, pin_memory=device.type == "cuda")
