"""INT4: 4-bit codes for every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtune.quantisation.per_token import PerTokenInteger


@dataclass(frozen=True)
class Int4(PerTokenInteger):
    """Asymmetric 4-bit codes, ``group`` channels of a token (default 32) sharing a minimum and a step.

    Keys have channels that are large in every token; per token they widen the step of their whole group,
    which is why keys lose more than values here (KIVI, arXiv 2402.02750).
    """

    group: int = 32

    name: ClassVar[str] = "int4"
    title: ClassVar[str] = "INT4 per token, groups of 32 channels"
    source: ClassVar[str] = "per-token group-wise quantisation as in FlexGen, arXiv 2303.06865"
    bits: ClassVar[int] = 4
