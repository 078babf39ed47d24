"""INT8: 8-bit codes for every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtune.quantisation.per_token import PerTokenInteger


@dataclass(frozen=True)
class Int8(PerTokenInteger):
    """Asymmetric 8-bit codes, ``group`` channels of a token (default 64) sharing a minimum and a step.

    Engines differ in the grain of their scales (per tensor, per token, per group); per token and group is
    the finest in use, so errors here are those of a good implementation.
    """

    group: int = 64

    name: ClassVar[str] = "int8"
    title: ClassVar[str] = "INT8 per token, groups of 64 channels"
    source: ClassVar[str] = "per-token group-wise quantisation as in FlexGen, arXiv 2303.06865"
    bits: ClassVar[int] = 8
