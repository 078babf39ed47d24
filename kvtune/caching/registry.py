"""The replacement policies by name: a new one is a file and a row."""

from __future__ import annotations

from kvtune.caching.base import Cache
from kvtune.caching.belady import Belady
from kvtune.caching.lru import PlainLRU
from kvtune.caching.wave_buffer import WaveBuffer
from kvtune.errors import unknown

_CACHES: tuple[type[Cache], ...] = (PlainLRU, WaveBuffer, Belady)


def caches() -> dict[str, type[Cache]]:
    """Every replacement policy, by name."""
    return {cache.name: cache for cache in _CACHES}


def get_cache(name: str) -> Cache:
    """The replacement policy called ``name``; an unknown name is an ``InputError`` with a suggestion."""
    known = caches()
    if name not in known:
        raise unknown("cache", name, known)
    return known[name]()
