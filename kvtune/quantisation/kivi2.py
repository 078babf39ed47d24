"""KIVI: 2-bit codes, keys per channel, values per token, the most recent tokens native."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvtune.errors import InputError
from kvtune.quantisation.base import Part, Precision, check_vectors
from kvtune.quantisation.groups import bound_groups, code_groups, group_bytes


@dataclass(frozen=True)
class Kivi2(Precision):
    """KIVI (arXiv 2402.02750): asymmetric 2-bit codes and a residual window in the model's precision.

    ``group``: for keys, tokens of one channel that share a minimum and a step; for values, channels of one
    token (default 32). ``window``: the most recent tokens stay native (default 32).

    Key groups start at multiples of ``group``. A group is coded when all of it has left the window, so
    the window holds ``window`` to ``window`` + ``group`` - 1 keys and ``window`` values; the paper's code
    empties the key window whenever it is full, so that it holds 0 to 31 keys. With at least 32 native keys
    at every step, results do not depend on where in a group an answer starts.
    """

    group: int = 32
    window: int = 32

    name: ClassVar[str] = "kivi2"
    title: ClassVar[str] = "KIVI, 2 bits: keys per channel, values per token"
    source: ClassVar[str] = "KIVI, arXiv 2402.02750"
    bits: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.group < 1 or self.window < 0:
            raise InputError("precision 'kivi2': the group must be at least 1, the window at least 0")

    def coded(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        check_vectors(vectors, part)
        if part == "values":
            return code_groups(vectors, self.bits, self.group)
        whole = self._whole(vectors)
        by_channel = code_groups(vectors[:, :whole].transpose(1, 2), self.bits, self.group)
        return torch.cat([by_channel.transpose(1, 2), vectors[:, whole:].float()], 1)

    def error_bound(self, vectors: Tensor, part: Part, calibrated: int | None = None) -> Tensor:
        """Half a step: range / 6 of the group (of one channel for keys, of one token for values)."""
        if part == "values":
            return bound_groups(vectors, self.bits, self.group)
        whole = self._whole(vectors)
        by_channel = bound_groups(vectors[:, :whole].transpose(1, 2), self.bits, self.group)
        rest = torch.zeros_like(vectors[:, whole:], dtype=torch.float32)
        return torch.cat([by_channel.transpose(1, 2), rest], 1)

    def token_bytes(self, dim: int, part: Part, item_bytes: int = 2) -> float:
        if part == "values":
            return group_bytes(dim, self.bits, self.group, item_bytes)
        return dim * group_bytes(self.group, self.bits, self.group, item_bytes) / self.group

    def native_from(self, lengths: Tensor, part: Part) -> Tensor:
        first = (lengths - self.window).clamp_min(0)
        return first if part == "values" else first // self.group * self.group

    def _whole(self, keys: Tensor) -> int:
        """Tokens in complete groups: the rest cannot be coded yet."""
        return keys.shape[1] // self.group * self.group
