"""kvtune: measure, simulate and tune the KV cache of long-context LLMs, with evidence."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "open_trace": "kvtune.traces",
    "capture": "kvtune.capturing",
    "analyze": "kvtune.analysis",
    "compare": "kvtune.analysis",
    "simulate": "kvtune.caching",
    "calibrate": "kvtune.hardware",
    "live": "kvtune.runtime",
    "tune": "kvtune.tuning",
}
__all__ = [
    "__version__",
    "analyze",
    "calibrate",
    "capture",
    "compare",
    "live",
    "open_trace",
    "simulate",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Import the public functions on first use: the command line must start without torch."""
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'kvtune' has no attribute '{name}'")
