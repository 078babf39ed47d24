"""What INT8 and INT4 share: asymmetric codes in groups of channels, every token by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvtune.errors import InputError
from kvtune.quantisation.base import Part, Precision, check_vectors
from kvtune.quantisation.groups import bound_groups, code_groups, group_bytes


@dataclass(frozen=True)
class PerTokenInteger(Precision):
    """``bits`` per channel; ``group`` channels of one token share a minimum and a step."""

    group: int
    bits: ClassVar[int]

    def __post_init__(self) -> None:
        if self.group < 1:
            raise InputError(f"precision '{self.name}': the group must be at least 1, not {self.group}")

    def coded(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        check_vectors(vectors, part)
        return code_groups(vectors, self.bits, self.group)

    def error_bound(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        """Half a step of the group: range / (2^bits - 1) / 2."""
        return bound_groups(vectors, self.bits, self.group)

    def token_bytes(self, dim: int, part: Part, item_bytes: int = 2) -> float:
        return group_bytes(dim, self.bits, self.group, item_bytes)
