"""Which precision serves which head: one for all, other ones for single layers and single heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from kvtune.quantisation.base import PARTS, Part, Precision
from kvtune.quantisation.registry import get_precision


@dataclass(frozen=True)
class HeadPrecision:
    """Storage of one kv head's keys and values, by name. Unknown names are ``InputError``."""

    keys: str = "native"
    values: str = "native"

    def __post_init__(self) -> None:
        for part in PARTS:
            self.of(part)

    @classmethod
    def both(cls, name: str) -> Self:
        """Keys and values alike."""
        return cls(name, name)

    def of(self, part: Part) -> Precision:
        return get_precision(self.keys if part == "keys" else self.values)


@dataclass(frozen=True)
class PrecisionPlan:
    """Precision of every head of a model: a head's own, else its layer's, else the default.

    ``layers`` by layer, ``heads`` by (layer, kv head).
    """

    default: HeadPrecision = HeadPrecision()
    layers: Mapping[int, HeadPrecision] = field(default_factory=dict)
    heads: Mapping[tuple[int, int], HeadPrecision] = field(default_factory=dict)

    def for_layer(self, layer: int, kv_heads: Sequence[int]) -> tuple[HeadPrecision, ...]:
        """The precision of each of ``kv_heads`` of ``layer``."""
        base = self.layers.get(layer, self.default)
        return tuple(self.heads.get((layer, head), base) for head in kv_heads)


def as_precision_plan(precision: str | HeadPrecision | PrecisionPlan) -> PrecisionPlan:
    """A name, or one precision for all heads, as the plan that uses it everywhere."""
    if isinstance(precision, PrecisionPlan):
        return precision
    return PrecisionPlan(HeadPrecision.both(precision) if isinstance(precision, str) else precision)
