"""FP8: 8-bit floats, with one scale for each head or without any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtune.quantisation.base import Part, Precision, check_vectors

E4M3_MAX = 448.0
_HALF_STEP = 2.0**-4
"""Largest relative rounding error: 3 mantissa bits."""
_HALF_SUBNORMAL = 2.0**-10
"""Largest rounding error below the normal range: half of 2^-9."""


@dataclass(frozen=True)
class FP8(Precision):
    """E4M3 (4 exponent bits, 3 mantissa bits, no infinity) with one scale for each head's keys and values.

    The scale is the largest magnitude of the calibrated tokens (the prompt) divided by 448; it is fixed
    from then on, and a later, larger number saturates. Small numbers keep their relative precision down to
    2^-6 scales, so a few huge channels harm the others less than with integers. The scales, 4 bytes a head,
    are not counted per token.
    """

    name: ClassVar[str] = "fp8"
    title: ClassVar[str] = "FP8 E4M3, one scale per head"
    source: ClassVar[str] = "FP8 formats, arXiv 2209.05433; vLLM's fp8 KV cache with calculated scales"

    def coded(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        check_vectors(vectors, part)
        scale = self.scale(vectors, calibrated)
        within = (vectors.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
        return within.to(torch.float8_e4m3fn).float() * scale

    def scale(self, vectors: Tensor, calibrated: int | None = None) -> Tensor:
        """The number that 1.0 in FP8 stands for, [H, 1, 1] float32."""
        first = vectors[:, : None if calibrated is None else max(1, calibrated)].float()
        if not first.numel():
            return torch.ones(len(vectors), 1, 1, device=vectors.device)
        largest = first.abs().amax((1, 2), keepdim=True)
        smallest = torch.finfo(torch.float32).smallest_normal
        return torch.where(largest > 0, (largest / E4M3_MAX).clamp_min(smallest), 1.0)

    def error_bound(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        """|x| / 16, at least scale / 1024 (subnormal numbers); what lies beyond 448 scales is cut off."""
        scale = self.scale(vectors, calibrated)
        size = vectors.float().abs()
        rounded = torch.maximum(size * _HALF_STEP, scale * _HALF_SUBNORMAL)
        slack = 4 * torch.finfo(torch.float32).eps * size
        return torch.maximum(rounded, size - E4M3_MAX * scale) + slack

    def token_bytes(self, dim: int, part: Part, item_bytes: int = 2) -> float:
        return dim


@dataclass(frozen=True)
class FP8Unscaled(FP8):
    """E4M3 with scale 1.0: what engines do when a checkpoint brings no scales, and what users complain of.

    Magnitudes above 448 saturate (large key channels of some models), and those below 2^-6 lose precision.
    """

    name: ClassVar[str] = "fp8_unscaled"
    title: ClassVar[str] = "FP8 E4M3, scale 1.0"
    source: ClassVar[str] = "the default of vLLM's fp8 KV cache without calibrated scales"

    def scale(self, vectors: Tensor, calibrated: int | None = None) -> Tensor:
        return torch.ones(len(vectors), 1, 1, device=vectors.device)
