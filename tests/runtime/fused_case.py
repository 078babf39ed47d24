"""Decode steps of a fused layer beside those of its policy, over random keys and values of ragged prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvtune.attention import group_queries, sparse_attention
from kvtune.geometry import LayerInfo
from kvtune.policies.base import Policy
from kvtune.runtime.fused_layer import FusedLayer, LayerStore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP, DIM, VALUE_DIM = 3, 12, 10


def layer_info(kv_heads: int = 1, **changes: Any) -> LayerInfo:
    """Three query heads a kv head."""
    shape = {"layer": 0, "n_layers": 1, "n_heads": GROUP * kv_heads, "n_kv_heads": kv_heads, "item_bytes": 4}
    return LayerInfo(**{**shape, "head_dim": DIM, "value_dim": VALUE_DIM, "scaling": 0.5, **changes})


class Beside:
    """A fused layer and its policy's indexes, started on the same prompts."""

    def __init__(
        self,
        layer: FusedLayer,
        policy: Policy,
        lengths: list[int],
        room: int,
        windows: list[int] | None = None,
    ) -> None:
        self.layer, self.policy, self.info = layer, policy, layer.info
        self.random = torch.Generator().manual_seed(sum(lengths))
        store = LayerStore.empty(self.info, len(lengths), room, torch.float32, DEVICE)
        store.lengths = list(lengths)
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.indexes: list[Any] = []
        self.blocks: list[list[list[int]]] = []
        """Of every step and sequence, the blocks of its first kv head."""
        queries = []
        for sequence, length in enumerate(lengths):
            keys, values = self.tokens(length)
            queries.append(self.new(len(keys), GROUP, windows[sequence] if windows else 0, DIM))
            store.put(sequence, 0, keys, values)
            self.kept.append((keys, values))
            self.indexes.append(policy.build(keys, values, queries[-1], self.info))
        layer.start(store, queries if windows else None)

    def new(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(DEVICE)

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        heads = self.info.n_kv_heads
        return self.new(heads, count, DIM), self.new(heads, count, VALUE_DIM)

    def append(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Tokens [H, n, …] to what the policy sees."""
        old_keys, old_values = self.kept[sequence]
        position = torch.arange(old_keys.shape[1], old_keys.shape[1] + keys.shape[1], device=DEVICE)
        self.policy.append(self.indexes[sequence], keys, values, position)
        self.kept[sequence] = torch.cat([old_keys, keys], 1), torch.cat([old_values, values], 1)

    def extend(self, count: int) -> None:
        """``count`` tokens that are attended densely, to every sequence."""
        for sequence in range(len(self.kept)):
            keys, values = self.tokens(count)
            self.append(sequence, keys, values)
            self.layer.extend(sequence, keys, values)

    def again(self, kept: list[tuple[Tensor, Tensor]]) -> None:
        """Let the policy see ``kept`` alone, as if built on them without prompt queries."""
        self.kept = kept
        none = self.new(self.info.n_kv_heads, GROUP, 0, DIM)
        self.indexes = [self.policy.build(*stored, none, self.info) for stored in kept]

    def step(self) -> tuple[list[set[int]], list[set[int]]]:
        """One token each; the outputs agree. Returns the positions that each unit attended: layer, policy."""
        batch, heads = len(self.kept), self.info.n_kv_heads
        queries = self.new(batch, heads * GROUP, DIM)
        keys, values = self.new(batch, heads, DIM), self.new(batch, heads, VALUE_DIM)
        out = self.layer.attend(queries, keys, values).clone()
        theirs: list[set[int]] = []
        self.blocks.append([])
        for sequence in range(batch):
            self.append(sequence, keys[sequence, :, None], values[sequence, :, None])
            stored = self.kept[sequence]
            position = torch.tensor([stored[0].shape[1] - 1], device=DEVICE)
            grouped = group_queries(queries[sequence][None], heads)
            selection = self.policy.select(self.indexes[sequence], grouped, position)
            want, _ = sparse_attention(grouped, position, *stored, selection, self.info)
            torch.testing.assert_close(out[sequence], want[0].flatten(0, 1), rtol=0, atol=1e-4)
            self.blocks[-1].append([block for block in selection.blocks[0, 0].tolist() if block >= 0])
            theirs += [{row for row in rows if row >= 0} for rows in selection.positions[0].tolist()]
        mine = attended(self.layer)
        self.layer.advance()
        assert self.layer.store.lengths == [keys.shape[1] for keys, _ in self.kept]
        return mine, theirs


def attended(layer: Any) -> list[set[int]]:
    """The rows that the last step of each unit attended, each once."""
    found = []
    for unit, (first, sink, start, stop) in enumerate(layer.rows.resident.tolist()):
        listed = layer.rows.listed[unit, : int(layer.rows.n_listed[unit])].tolist()
        rows = [*range(first, first + sink), *range(start, stop), *listed]
        assert len(rows) == len(set(rows))
        found.append(set(rows))
    return found
