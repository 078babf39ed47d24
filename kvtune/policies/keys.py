"""The growing keys of one layer: what a policy without a structure of its own keeps as its index."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo


class KeyStore:
    """Keys [H, n, d] and values [H, n, dv] of positions 0…n-1, appended in place with room to grow."""

    def __init__(self, keys: Tensor, values: Tensor, layer: LayerInfo) -> None:
        self.layer = layer
        self.prompt_length = keys.shape[1]
        self._keys, self._values = keys, values
        self.length = keys.shape[1]

    @property
    def keys(self) -> Tensor:
        return self._keys[:, : self.length]

    @property
    def values(self) -> Tensor:
        return self._values[:, : self.length]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens; capacity doubles, so many single appends stay linear."""
        end = self.length + keys.shape[1]
        if end > self._keys.shape[1]:
            self._keys = _grown(self.keys, end)
            self._values = _grown(self.values, end)
        self._keys[:, self.length : end] = keys
        self._values[:, self.length : end] = values
        self.length = end


def _grown(rows: Tensor, needed: int) -> Tensor:
    room = torch.empty(
        rows.shape[0], max(needed, 2 * rows.shape[1]), rows.shape[2], dtype=rows.dtype, device=rows.device
    )
    room[:, : rows.shape[1]] = rows
    return room
