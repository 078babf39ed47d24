"""Decode steps of a fused wave-index layer to be timed: whole, or without some of their stages.

In a model other layers and the weights come between two steps of a layer, so that nothing of a layer is left
in the device's cache when its next step begins. Here layers of one setting take turns, enough of them to
fill that cache a few times over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from kvtune.geometry import PAGE_TOKENS, LayerInfo
from kvtune.hardware.clock import Body
from kvtune.hardware.traffic import LayerTraffic
from kvtune.kernels.attend import Estimate, Rows
from kvtune.kernels.choose import choose, cut
from kvtune.kernels.scan import centroid_logits
from kvtune.runtime.fused_offload import FusedWaveOffload
from kvtune.runtime.fused_wave import FusedWave


class Unfilled(FusedWaveOffload):
    """A layer whose host memory has any content; one such memory serves several layers of a setting."""

    def _put_clusters(self, sequence: int, rows: Tensor, first: int, grown: int) -> int:
        return 0

    def share_host(self, other: FusedWave) -> None:
        """Use the host memory of ``other`` and let the own go."""
        assert isinstance(other, FusedWaveOffload)
        self.host_keys, self.host_values = other.host_keys, other.host_values


class WaveSteps:
    """``calls`` steps: each of ``layers`` in turn, ``rounds`` times over.

    Layers are started, of one setting, and take part in nothing else from now on. Every round appends a
    token; every body begins by taking back those of the last call. ``keep`` is the correlation of a layer's
    query with its query of the round before: the higher, the more clusters a page cache has.
    """

    def __init__(self, layers: Sequence[FusedWave], rounds: int, keep: float = 0.0, seed: int = 0) -> None:
        self.layers, self.rounds = list(layers), rounds
        self.info: LayerInfo = layers[0].info
        self.batch = len(layers[0].store.lengths)
        self.resident = torch.stack([layer.resident for layer in layers])
        self.first = self.resident.clone()
        for layer, rows in zip(layers, self.resident):
            layer.resident = layer.rows.resident = rows
            layer.attention.side = layers[0].attention.side
            if isinstance(layer, FusedWaveOffload) and isinstance(layers[0], FusedWaveOffload):
                layer.side = layers[0].side
        keys = layers[0].store.keys
        generator = torch.Generator(keys.device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=keys.device)

        heads, info = self.info.n_kv_heads, self.info
        shape = (len(layers), self.batch, info.n_heads, info.head_dim)
        queries = [random(*shape)]
        for _ in range(rounds - 1):
            queries.append(keep * queries[-1] + (1 - keep**2) ** 0.5 * random(*shape))
        self.queries = torch.stack(queries).to(keys.dtype)
        self.key = random(self.batch, heads, info.head_dim).to(keys.dtype)
        self.value = random(self.batch, heads, info.value_dim).to(keys.dtype)
        self.count_from_now()

    @property
    def offloaded(self) -> bool:
        """Whether clusters lie in host memory."""
        return isinstance(self.layers[0], FusedWaveOffload)

    @property
    def streams(self) -> list[torch.cuda.Stream]:
        """Streams that a step forks to."""
        first = self.layers[0]
        both = (first.attention.side, first.side if isinstance(first, FusedWaveOffload) else None)
        return [stream for stream in both if stream is not None]

    @property
    def calls(self) -> int:
        """Steps in one run of a body."""
        return len(self.layers) * self.rounds

    def whole(self) -> None:
        """All steps, as the runtime makes them."""
        self.resident.copy_(self.first)
        for layer, query in self._turns():
            layer.attend(query, self.key, self.value)
            layer.join()

    def partly(self, parts: Collection[str]) -> Body:
        """All steps, of their stages only ``parts`` and exact attention.

        Parts are append, scan, choose (which needs id_copy: that clears its scratch), id_copy, estimate,
        lookup (and update) and fetch; what the others left stays. Made of the runtime's own kernels in its
        own order. Valid once whole steps have been made.
        """

        def body() -> None:
            self.resident.copy_(self.first)
            for layer, query in self._turns():
                _partial_step(layer, query, self.key, self.value, parts)

        return body

    def count_from_now(self) -> None:
        """Forget the misses so far."""
        self._looked_up = self._counters()

    def traffic(self) -> LayerTraffic:
        """What a step of one sequence moved, all kv heads: the mean over the last step of every layer.

        Misses are the mean of those counted.
        """
        info, steps = self.info, len(self.layers) * self.batch
        tokens, pages, blocks, estimated, visible = (
            sum(column) / steps for column in zip(*(_chosen(layer) for layer in self.layers))
        )
        rows = self.first[..., 1] + self.first[..., 3] - self.first[..., 2]
        resident = float(rows.double().mean()) + (self.rounds + 1) / 2
        heads = info.n_kv_heads
        lacking_pages, lacking_tokens = self.missed_shares()
        return LayerTraffic(
            scan_bytes=visible * info.head_dim * info.item_bytes,
            estimation_bytes=estimated * (info.value_dim * info.item_bytes + 4),
            exact_bytes=(-(-resident // PAGE_TOKENS) * heads + pages) * info.page_bytes,
            missed_bytes=lacking_pages * pages * info.page_bytes,
            blocks=blocks,
            attended_bytes=(resident * heads + tokens) * info.token_bytes,
            fetched_bytes=lacking_tokens * tokens * info.token_bytes,
        )

    def _turns(self) -> Iterator[tuple[FusedWave, Tensor]]:
        for queries in self.queries:
            yield from zip(self.layers, queries)

    def _counters(self) -> Tensor:
        """Requests, pages and tokens of all page caches so far: hits and asked, [3, 2]."""
        caches = [layer.cache for layer in self.layers if isinstance(layer, FusedWaveOffload)]
        return sum((cache.counters().sum(0).cpu() for cache in caches), torch.zeros(3, 2, dtype=torch.int64))

    def missed_shares(self) -> tuple[float, float]:
        """Shares of the pages and of the tokens looked up that the caches lacked; 0 without caches."""
        hits, asked = (self._counters() - self._looked_up).double().unbind(1)
        shares = torch.where(asked > 0, 1 - hits / asked.clamp_min(1), 0.0)
        return float(shares[1]), float(shares[2])


def _partial_step(
    layer: FusedWave, query: Tensor, key: Tensor, value: Tensor, parts: Collection[str]
) -> None:
    """One step without some stages: :meth:`FusedWave.attend`, launch by launch."""
    info, choice, attention = layer.info, layer.choice, layer.attention
    grouped = query.reshape(-1, info.group, info.head_dim)
    with attention.beside():  # even for nothing: the fork is part of every step
        if "append" in parts:
            layer.store.append(key, value, layer.resident)
    if "scan" in parts:
        centroid_logits(grouped, layer.centroids, layer.visible, layer.logits, layer.stats, info.scaling)
    if "choose" in parts:
        choose(layer.logits, layer.stats, layer.sizes, layer.plan, choice)
    if "estimate" in parts:
        with attention.beside():
            attention.estimate(
                Estimate(layer.logits, layer.sizes, layer.value_sums, choice.estimated, choice.n_estimated),
                grouped,
                info.scaling,
            )
    rows = _offloaded_rows(layer, parts) if isinstance(layer, FusedWaveOffload) else _rows(layer, parts)
    attention(
        grouped, layer.store.keys, layer.store.values, rows, layer.out, info.scaling, choice.n_estimated
    )
    layer.join()


def _rows(layer: FusedWave, parts: Collection[str]) -> Rows:
    if "id_copy" in parts:
        cut(layer.choice, layer.sizes, layer.plan, layer.offsets, layer.rows.listed)
    return layer.rows


def _offloaded_rows(layer: FusedWaveOffload, parts: Collection[str]) -> Rows:
    """A lookup goes with its update, which takes back what the lookup gave out."""
    found = layer.cache.found
    if "id_copy" in parts:
        cut(layer.choice, layer.sizes, layer.plan)
    side = layer.side
    if side is not None:  # even for nothing: a capture must know the stream that join() waits for
        side.wait_stream(torch.cuda.current_stream())
    if "lookup" in parts:
        found = layer.cache.lookup(layer.choice.retrieved, layer.offsets)
        if side is None:
            layer.cache.update(found)
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                layer.cache.update(found)
    if "fetch" in parts:
        layer.cache.fetch(found, layer.host_keys, layer.host_values, layer.store.keys, layer.store.values)
    return Rows(layer.resident, found.rows, found.n_rows, layer.rows.longest)


def _chosen(layer: FusedWave) -> tuple[int, int, int, int, int]:
    """Of a layer's last step: tokens, pages and blocks retrieved, clusters estimated and visible."""
    retrieved = layer.choice.retrieved
    held = retrieved >= 0
    sizes = layer.sizes.gather(1, retrieved.clamp_min(0).long()) * held
    pages = (sizes + PAGE_TOKENS - 1) // PAGE_TOKENS
    sums = (sizes, pages, held, layer.choice.n_estimated, layer.visible)
    tokens, n_pages, blocks, estimated, visible = (int(part.sum()) for part in sums)
    return tokens, n_pages, blocks, estimated, visible
