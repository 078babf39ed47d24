"""What the fused engine asks of a layer, and the layers that attend a plain range of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo
from kvtune.kernels.append import UNBOUNDED, append
from kvtune.kernels.attend import Rows, SparseAttention
from kvtune.runtime.step_log import StepLog

Device = torch.device | str
TRIED_STEPS = 4
"""Steps at most that a store has room for beyond those asked for."""


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

    def units(self, sequence: int) -> slice:
        """The units of one sequence."""
        heads = len(self.keys) // len(self.lengths)
        return slice(sequence * heads, (sequence + 1) * heads)

    def of(self, sequence: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Rows ``start`` … length of one sequence: keys [H, n, d] and values [H, n, dv] (views)."""
        units, stop = self.units(sequence), self.lengths[sequence]
        return self.keys[units, start:stop], self.values[units, start:stop]

    def put(self, sequence: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Write keys [H, n, d] and values [H, n, dv] at rows ``row`` … of one sequence."""
        units, rows = self.units(sequence), slice(row, row + keys.shape[1])
        self.keys[units, rows] = keys
        self.values[units, rows] = values

    def append(
        self, keys: Tensor, values: Tensor, resident: Tensor, sink: int = 0, window: int = UNBOUNDED
    ) -> None:
        """The new token of every sequence, on the device: keys [B, H, d], values [B, H, dv]."""
        flat_keys, flat_values = keys.reshape(-1, keys.shape[-1]), values.reshape(-1, values.shape[-1])
        append(flat_keys, flat_values, self.keys, self.values, resident, sink, window)


class FusedLayer(ABC):
    """One layer of B sequences that decodes by kernels of fixed shapes, so that a step fits a CUDA graph.

    :meth:`start` once the prompts are in; then, a step at a time, :meth:`attend` (may be captured) and
    :meth:`advance` (the host's part, outside a graph). Rows of the store at positions from the prompt's end
    on are in the order of positions, unless a layer says otherwise in :meth:`made`.
    """

    info: LayerInfo
    store: LayerStore
    log: StepLog | None = None
    """Where blocks retrieved are noted, if anywhere."""

    def room(self, lengths: Sequence[int], new_tokens: int) -> int:
        """Rows that the store needs for prompts of ``lengths`` tokens and ``new_tokens`` more.

        Steps that are tried before a capture, and forgotten, write behind them.
        """
        return max(lengths) + new_tokens + TRIED_STEPS

    def start(self, store: LayerStore, prompt_queries: list[Tensor] | None = None) -> None:
        """Take over the prompts in ``store`` and build what the method needs: :meth:`build`, :meth:`finish`.

        prompt_queries: of each sequence, the last ones of its prompt [H, G, W, d].
        """
        self.build(store, prompt_queries)
        self.finish()

    @abstractmethod
    def build(self, store: LayerStore, prompt_queries: list[Tensor] | None = None) -> None:
        """The part of :meth:`start` that only launches: nothing in it waits for the device."""

    def finish(self) -> None:
        """The part of :meth:`start` that waits for the device, where there is one."""
        return

    @abstractmethod
    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One token of every sequence: queries [B, Hq, d], keys [B, H, d], values [B, H, dv] → [B, Hq, dv].

        The result is overwritten by the next step.
        """

    def join(self) -> None:
        """Wait, on the device, for what :meth:`attend` left running; before the next step."""
        return

    @abstractmethod
    def settle(self) -> None:
        """Bring the device's state to what the host counts in ``store.lengths``: grow, set ranges."""

    def advance(self) -> None:
        """Count a step that :meth:`attend` made."""
        self.store.lengths = [length + 1 for length in self.store.lengths]

    def extend(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Add tokens that were attended densely: keys [H, n, d], values [H, n, dv]."""
        self.store.put(sequence, self.store.lengths[sequence], keys, values)
        self.store.lengths[sequence] += keys.shape[1]
        self.settle()

    def made(self, sequence: int, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values at positions ≥ ``start``, which is not before the prompt's end (views)."""
        return self.store.of(sequence, start)

    def mark(self) -> Any:
        """The state to come back to with :meth:`rewind`."""
        return list(self.store.lengths)

    def rewind(self, mark: Any) -> None:
        """Forget the tokens added since; page caches are empty afterwards."""
        self.store.lengths = list(mark)
        self.settle()

    def new_log(self, at: Tensor, steps: int) -> StepLog | None:
        """A log of this layer's shape; ``None`` where it asks nothing of a cache."""
        return None

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

    def build(self, store: LayerStore, prompt_queries: list[Tensor] | None = None) -> None:
        self.store = store
        units, room = store.keys.shape[:2]
        device, info = store.keys.device, self.info
        longest = room if self.window is None else min(room, self.window + self.sink)
        self.resident = torch.zeros(units, 4, dtype=torch.int32, device=device)
        none = torch.zeros(units, 1, dtype=torch.int32, device=device)
        self.rows = Rows(self.resident, none, none[:, 0], longest)
        self.attention = SparseAttention(units, info.group, info.value_dim, longest, 0, device)
        self.out = torch.empty(units, info.group, info.value_dim, dtype=store.values.dtype, device=device)
        self.settle()

    def settle(self) -> None:
        for sequence, length in enumerate(self.store.lengths):
            start = 0 if self.window is None else max(length - self.window, 0)
            row = [0, min(start, self.sink), start, length]
            self.resident[self.store.units(sequence)] = int_row(row, self.resident.device)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        info = self.info
        window = UNBOUNDED if self.window is None else self.window
        self.store.append(keys, values, self.resident, self.sink, window)
        grouped = queries.reshape(-1, info.group, info.head_dim)
        self.attention(
            grouped, self.store.keys, self.store.values, self.rows, self.out, info.scaling,
            softcap=info.softcap,
        )  # fmt: skip
        return self.out.view(len(queries), -1, info.value_dim)

    def gpu_bytes(self) -> dict[str, int]:
        kept = nbytes(self.store.keys, self.store.values)
        return {"kv": kept, "buffers": nbytes(self.attention.sums)}


def int_row(row: list[int], device: Device) -> Tensor:
    """Numbers as an int32 tensor on ``device``; the host does not wait for its stream."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(row, dtype=torch.int32, pin_memory=pinned).to(device, non_blocking=pinned)


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
