"""Numbers as people read them."""

from __future__ import annotations

import math

MISSING = "–"


def percent(share: float | None) -> str:
    """``0.0312`` is ``3.1%``, ``0.42`` is ``42%``."""
    if share is None or math.isnan(share):
        return MISSING
    return f"{share:.0%}" if abs(share) >= 0.0995 or share == 0 else f"{share:.1%}"


def number(value: float | None) -> str:
    """Three significant digits, thousands grouped."""
    if value is None or math.isnan(value):
        return MISSING
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def size(count: float | None) -> str:
    """Bytes with a binary unit: ``1536`` is ``1.5 KiB``."""
    if count is None or math.isnan(count):
        return MISSING
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
