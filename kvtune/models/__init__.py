"""Models: finding, converting and loading them, and what their attention looks like."""

from __future__ import annotations

from kvtune.models.adapters import (
    PassingCache,
    attention_modules,
    attention_through,
    cached,
    crop,
    decode_step,
    feed,
    new_cache,
    sdpa,
)
from kvtune.models.cache import cache_folder
from kvtune.models.catalog import CATALOG, PackagedModel
from kvtune.models.conversion import convert, is_converted
from kvtune.models.loading import (
    LoadedModel,
    ModelFiles,
    adopt,
    choose_device,
    choose_dtype,
    find_model,
    load_model,
    load_tokenizer,
    open_model,
)
from kvtune.models.rope import Rope

__all__ = [
    "CATALOG",
    "LoadedModel",
    "ModelFiles",
    "PackagedModel",
    "PassingCache",
    "Rope",
    "adopt",
    "attention_modules",
    "attention_through",
    "choose_device",
    "choose_dtype",
    "cache_folder",
    "cached",
    "convert",
    "crop",
    "decode_step",
    "feed",
    "find_model",
    "is_converted",
    "load_model",
    "load_tokenizer",
    "open_model",
    "new_cache",
    "sdpa",
]
