"""What each step of a fused layer asked of its cache, noted on the device and read when the run is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtune.caching import UnitAccesses
from kvtune.geometry import PAGE_TOKENS


@dataclass
class StepLog:
    """Room for T steps of U units.

    at [1] int64: the step to be written, shared by all layers and moved on by the engine
    retrieved [T, U, R] int32: blocks in rank order, -1 as padding; truncated [T, U] int32
    sizes [U, C]: tokens of each block, the layer's own, which may grow
    hits [T, U, R] int8, where a page cache answers (``None``: nothing is cached)
    """

    at: Tensor
    retrieved: Tensor
    truncated: Tensor
    sizes: Tensor
    hits: Tensor | None

    @classmethod
    def empty(
        cls, at: Tensor, steps: int, shape: Sequence[int], sizes: Tensor, cached: bool = False
    ) -> StepLog:
        """A log of ``steps`` steps for blocks of ``shape`` (U, R)."""
        units, retrieved = shape

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(steps, units, *shape, dtype=dtype, device=at.device)

        hits = new(retrieved, dtype=torch.int8) if cached else None
        return cls(at, new(retrieved) - 1, new(), sizes, hits)

    def note(self, retrieved: Tensor, truncated: Tensor, hits: Tensor | None = None) -> None:
        """Write one step: retrieved [U, R], truncated [U], hits [U, R]."""
        self.retrieved.index_copy_(0, self.at, retrieved[None])
        self.truncated.index_copy_(0, self.at, truncated[None])
        if self.hits is not None and hits is not None:
            self.hits.index_copy_(0, self.at, hits[None])

    def accesses(self, unit: int, steps: int, context: int) -> UnitAccesses:
        """The first ``steps`` steps of one unit."""
        blocks = self.retrieved[:steps, unit].cpu().numpy()
        used = blocks >= 0
        found = blocks[used].astype(np.int64)
        tokens = self.sizes[unit].cpu().numpy().astype(np.int64)[found]
        return UnitAccesses(
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(used.sum(1), dtype=np.int64)]),
            blocks=found,
            pages=(tokens + PAGE_TOKENS - 1) // PAGE_TOKENS,
            tokens=tokens,
            truncated=self.truncated[:steps, unit].cpu().numpy().astype(np.int64),
            context_tokens=context,
        )

    def hit_mask(self, unit: int, steps: int) -> list[bool]:
        """Whether each access of :meth:`accesses` was a hit, in its order."""
        assert self.hits is not None
        used = self.retrieved[:steps, unit] >= 0
        found: list[bool] = self.hits[:steps, unit][used].bool().tolist()
        return found
