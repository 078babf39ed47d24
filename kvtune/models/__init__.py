"""Models: finding, converting and loading them, and what their attention looks like."""

from __future__ import annotations

from kvtune.models.adapters import attention_through, cached, crop, feed, new_cache, sdpa
from kvtune.models.catalog import CATALOG, PackagedModel
from kvtune.models.conversion import cache_folder, convert, is_converted
from kvtune.models.loading import LoadedModel, adopt, find_model, load_config, load_model, load_tokenizer
from kvtune.models.rope import Rope

__all__ = [
    "CATALOG",
    "LoadedModel",
    "PackagedModel",
    "Rope",
    "adopt",
    "attention_through",
    "cache_folder",
    "cached",
    "convert",
    "crop",
    "feed",
    "find_model",
    "is_converted",
    "load_config",
    "load_model",
    "load_tokenizer",
    "new_cache",
    "sdpa",
]
