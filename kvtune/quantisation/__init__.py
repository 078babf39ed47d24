"""KV quantisation: precisions of the cache, and any recorded layer as it is held in one of them."""

from __future__ import annotations

from kvtune.quantisation.base import PARTS, Part, Precision
from kvtune.quantisation.layer import QuantisedLayer, quantised
from kvtune.quantisation.plan import HeadPrecision, PrecisionPlan, as_precision_plan
from kvtune.quantisation.registry import all_precisions, get_precision

__all__ = [
    "PARTS",
    "HeadPrecision",
    "Part",
    "Precision",
    "PrecisionPlan",
    "QuantisedLayer",
    "all_precisions",
    "as_precision_plan",
    "get_precision",
    "quantised",
]
