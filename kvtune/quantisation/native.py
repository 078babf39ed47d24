"""Native: the model's own precision, which the others are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtune.quantisation.base import Part, Precision, check_vectors


@dataclass(frozen=True)
class Native(Precision):
    """Keys and values as the model made them."""

    name: ClassVar[str] = "native"
    title: ClassVar[str] = "the model's own precision"
    source: ClassVar[str] = "no quantisation"

    def coded(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        check_vectors(vectors, part)
        return vectors.float()

    def error_bound(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        """0."""
        return torch.zeros_like(vectors, dtype=torch.float32)

    def token_bytes(self, dim: int, part: Part, item_bytes: int = 2) -> float:
        return dim * item_bytes
