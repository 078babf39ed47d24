"""Replaying block accesses through caches: hit ratios and traffic without running the model."""

from __future__ import annotations

from kvtune.caching.access_log import AccessLog, Unit, UnitAccesses, unit_accesses
from kvtune.caching.base import Cache
from kvtune.caching.pages import request_hits
from kvtune.caching.registry import caches, get_cache
from kvtune.caching.simulation import CacheResult, UnitResult, capacity_pages, check_budgets, simulate
from kvtune.caching.tally import WARM_UP_STEPS, HitRatio, Tally

__all__ = [
    "WARM_UP_STEPS",
    "AccessLog",
    "Cache",
    "CacheResult",
    "HitRatio",
    "Tally",
    "Unit",
    "UnitAccesses",
    "UnitResult",
    "caches",
    "capacity_pages",
    "check_budgets",
    "get_cache",
    "request_hits",
    "simulate",
    "unit_accesses",
]
