"""The contract of a storage precision of the KV cache: what is lost, what it costs, what stays native."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvtune.errors import InputError

Part = Literal["keys", "values"]
PARTS: tuple[Part, Part] = ("keys", "values")
LARGEST = 2.0**126
"""Magnitudes above it are refused: differences of two would overflow float32."""


class Precision(ABC):
    """How keys or values are stored.

    Class attributes: ``name`` (command line and profiles), ``title``, ``source`` (paper or engine). Vectors
    are [H, N, d], the N tokens of a cache from position 0 on, in the model's precision; H kv heads never
    influence each other.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]

    def round_trip(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        """What a cache of these N tokens gives back, [H, N, d] float32: the window native, the rest coded.

        Raises as :meth:`coded`.
        """
        coded = self.coded(vectors, part, calibrated)
        positions = torch.arange(vectors.shape[1], device=vectors.device)
        length = torch.tensor(vectors.shape[1], device=vectors.device)
        recent = positions >= self.native_from(length, part)
        return torch.where(recent[:, None], vectors.float(), coded)

    @abstractmethod
    def coded(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        """Every token quantised and dequantised, [H, N, d] float32, as if none were in the native window.

        Causal: a token's code depends on earlier tokens and its own group, which is complete when the
        window leaves it. ``calibrated``: how many leading tokens a scale that holds for all tokens may be
        taken from (the prompt; ``None``: all). Raises ``InputError`` for NaN, infinite and enormous numbers.
        """

    @abstractmethod
    def error_bound(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        """Closed-form bound of ``|coded - vectors|`` per element, [H, N, d] float32."""

    @abstractmethod
    def token_bytes(self, dim: int, part: Part, item_bytes: int = 2) -> float:
        """Bytes of one coded token's key or value of ``dim`` channels, scales and zeros included.

        ``item_bytes`` is the size of the model's numbers, in which scales are stored.
        """

    def native_from(self, lengths: Tensor, part: Part) -> Tensor:
        """The first position that a cache of ``lengths`` tokens holds natively (its length: none)."""
        return lengths


def check_vectors(vectors: Tensor, part: Part) -> None:
    """Refuse NaN, infinite and enormous numbers in vectors [H, N, d], naming head (row) and position."""
    if not vectors.numel():
        return
    low, high = (float(end) for end in torch.aminmax(vectors))
    if low >= -LARGEST and high <= LARGEST:
        return
    bad = ~(vectors.float().abs() <= LARGEST).all(-1)
    head, position = torch.nonzero(bad)[0].tolist()
    row = vectors[head, position]
    what = "NaN" if torch.isnan(row).any() else "infinite" if torch.isinf(row).any() else "too large"
    raise InputError(
        f"the {part[:-1]} of head {head}, position {position} is {what}", "it cannot be quantised"
    )
