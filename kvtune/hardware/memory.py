"""How many sequences a device holds: bytes of one sequence on it, part by part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from kvtune.caching.simulation import capacity_pages
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.hardware.cost import Offload
from kvtune.hardware.machine import Hardware
from kvtune.policies.retroinfer import UPDATE_TOKENS
from kvtune.policies.wave_index import WaveIndex

RESERVED_BYTES = 1 << 30
"""Device memory that no sequence gets: the CUDA context, activations, workspaces."""


@dataclass(frozen=True)
class SequenceMemory:
    """Bytes of one sequence on the device.

    index   centroids, value sums and sizes (or whatever the policy keeps), over all layers
    steady  the steady zone and the dense tail at its longest, over all layers
    cache   the page cache, over all layers
    buffer  the execution buffer, which the layers use in turn: the largest layer's
    kv      keys and values kept whole: of dense layers, or of all where nothing is offloaded
    """

    index: float = 0.0
    steady: float = 0.0
    cache: float = 0.0
    buffer: float = 0.0
    kv: float = 0.0

    @property
    def total(self) -> float:
        return self.index + self.steady + self.cache + self.buffer + self.kv

    def __add__(self, other: SequenceMemory) -> SequenceMemory:
        """Two layers together."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return SequenceMemory(**{**sums, "buffer": max(self.buffer, other.buffer)})

    def to_dict(self) -> dict[str, Any]:
        """Whole bytes, by part and in total."""
        return {**{f.name: round(getattr(self, f.name)) for f in fields(self)}, "total": round(self.total)}


def max_batch(hardware: Hardware, memory: SequenceMemory, weights_bytes: float) -> int:
    """Sequences that fit beside the weights and 1 GiB of reserve (0: not even one)."""
    free = hardware.device_memory.bytes - RESERVED_BYTES - weights_bytes
    return max(int(free // memory.total), 0) if memory.total else 0


def kv_bytes(layer: LayerInfo, tokens: float) -> float:
    """Keys and values of a layer inside its window."""
    held = tokens if layer.window is None else min(tokens, layer.window)
    return held * layer.token_bytes * layer.n_kv_heads


def full_memory(geometry: ModelGeometry, tokens: float) -> SequenceMemory:
    """Full attention: all keys and values on the device."""
    layers = map(geometry.layer, range(geometry.n_layers))
    return SequenceMemory(kv=sum(kv_bytes(layer, tokens) for layer in layers))


def wave_memory(
    geometry: ModelGeometry,
    context: int,
    policy: WaveIndex | None = None,
    *,
    cache_fraction: float = 0.05,
    new_tokens: int = UPDATE_TOKENS,
    offload: Offload = "cpu",
    dense_layers: Collection[int] = (),
) -> SequenceMemory:
    """The wave index without a trace: ``context`` tokens of prompt and ``new_tokens`` to be decoded.

    The page cache has ``cache_fraction`` of the context's pages in every kv head. With ``offload`` ``none``
    all keys and values are on the device, and no steady zone, cache or buffer beside them.
    """
    policy = WaveIndex() if policy is None else policy
    total = SequenceMemory()
    for layer in map(geometry.layer, range(geometry.n_layers)):
        counts = policy.counts(context)
        if layer.window is not None or layer.layer in dense_layers or not counts.n_centroids:
            total += SequenceMemory(kv=kv_bytes(layer, context + new_tokens))
            continue
        heads, grown = layer.n_kv_heads, new_tokens // UPDATE_TOKENS
        clusters = counts.n_centroids + grown * counts.growth.centroids
        row = (layer.head_dim + layer.value_dim) * layer.item_bytes + policy.number_bytes
        index = float(heads * clusters * row)
        if offload == "none":
            total += SequenceMemory(index=index, kv=kv_bytes(layer, context + new_tokens))
            continue
        steady = policy.sink + policy.local + min(new_tokens, UPDATE_TOKENS)
        retrieved = counts.nprobe + grown * counts.growth.nprobe
        room = max(counts.buffer_clusters, 4 * retrieved) * counts.pages_per_cluster
        total += SequenceMemory(
            index=index,
            steady=heads * steady * layer.token_bytes,
            cache=heads * capacity_pages(cache_fraction, context) * layer.page_bytes,
            buffer=heads * room * layer.page_bytes,
        )
    return total
