"""What the fused engine asks of a layer, and the layers that attend a plain range of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo
from kvtune.kernels.append import UNBOUNDED, append
from kvtune.kernels.attend import Rows, SparseAttention

Device = torch.device | str


@dataclass
class LayerStore:
    """Keys [B·H, room, d] and values [B·H, room, dv] of one layer of B sequences, with room to grow.

    A **unit** is one kv head of one sequence. ``lengths`` holds the tokens of each sequence (as the host
    counts them).
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]

    @classmethod
    def empty(cls, info: LayerInfo, batch: int, room: int, dtype: torch.dtype, device: Device) -> LayerStore:
        units = batch * info.n_kv_heads
        return cls(
            torch.zeros(units, room, info.head_dim, dtype=dtype, device=device),
            torch.zeros(units, room, info.value_dim, dtype=dtype, device=device),
            [0] * batch,
        )

    def of(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys [H, N, d] and values [H, N, dv] of one sequence (views)."""
        heads = len(self.keys) // len(self.lengths)
        units = slice(sequence * heads, (sequence + 1) * heads)
        n = self.lengths[sequence]
        return self.keys[units, :n], self.values[units, :n]

    def append(
        self, keys: Tensor, values: Tensor, resident: Tensor, sink: int = 0, window: int = UNBOUNDED
    ) -> None:
        """The new token of every sequence, on the device: keys [B, H, d], values [B, H, dv]."""
        flat_keys, flat_values = keys.reshape(-1, keys.shape[-1]), values.reshape(-1, values.shape[-1])
        append(flat_keys, flat_values, self.keys, self.values, resident, sink, window)


class FusedLayer(ABC):
    """One layer of B sequences that decodes by kernels of fixed shapes, so that a step fits a CUDA graph.

    :meth:`start` once the prompts are in; then, a step at a time, :meth:`attend` (may be captured) and
    :meth:`advance` (the host's part, outside a graph).
    """

    info: LayerInfo

    @abstractmethod
    def start(self, store: LayerStore) -> None:
        """Take over the prompts and build what the method needs."""

    @abstractmethod
    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One token of every sequence: queries [B, Hq, d], keys [B, H, d], values [B, H, dv] → [B, Hq, dv].

        The result is overwritten by the next step.
        """

    @abstractmethod
    def advance(self) -> None:
        """Do what the host must after a step: count it, let an index grow."""

    def gpu_bytes(self) -> dict[str, int]:
        """Bytes on the device by purpose: ``kv``, ``cache``, ``index``, ``buffers``."""
        return {}

    def host_bytes(self) -> int:
        """Bytes of keys and values in host memory."""
        return 0


class RangeLayer(FusedLayer):
    """Attends the first ``sink`` and the last ``window`` tokens (``None``: all) of every sequence.

    Serves dense layers, layers with a sliding window of their own, and StreamingLLM.
    """

    def __init__(self, info: LayerInfo, sink: int = 0, window: int | None = None) -> None:
        self.info = info
        self.sink = sink if window is not None else 0
        self.window = window

    def start(self, store: LayerStore) -> None:
        self.store = store
        units, room = store.keys.shape[:2]
        device, info = store.keys.device, self.info
        longest = room if self.window is None else min(room, self.window + self.sink)
        self.resident = torch.zeros(units, 4, dtype=torch.int32, device=device)
        none = torch.zeros(units, 1, dtype=torch.int32, device=device)
        self.rows = Rows(self.resident, none, none[:, 0], longest)
        self.attention = SparseAttention(units, info.group, info.value_dim, longest, 0, device)
        self.out = torch.empty(units, info.group, info.value_dim, dtype=store.values.dtype, device=device)
        lengths = torch.tensor(store.lengths, dtype=torch.int32, device=device)
        self.resident[:, 3] = lengths.repeat_interleave(units // len(store.lengths))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch = len(queries)
        window = UNBOUNDED if self.window is None else self.window
        self.store.append(keys, values, self.resident, self.sink, window)
        grouped = queries.reshape(-1, self.info.group, self.info.head_dim)
        self.attention(
            grouped, self.store.keys, self.store.values, self.rows, self.out, self.info.scaling,
            softcap=self.info.softcap,
        )  # fmt: skip
        return self.out.view(batch, -1, self.info.value_dim)

    def advance(self) -> None:
        self.store.lengths = [length + 1 for length in self.store.lengths]

    def gpu_bytes(self) -> dict[str, int]:
        return {"kv": nbytes(self.store.keys, self.store.values), "buffers": nbytes(self.attention.sums)}


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
