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
    """Three digits: ``0.390``, ``1.27``, ``31.1``, ``2,084``; very small ones as ``1.3e-04``."""
    if value is None or math.isnan(value):
        return MISSING
    if 0 < abs(value) < 0.0005:
        return f"{value:.1e}"
    digits = next((d for limit, d in ((0.9995, 3), (9.995, 2), (99.95, 1)) if abs(value) < limit), 0)
    return f"{value:,.{digits}f}"


def short(text: str) -> str:
    """A number's text without zeros behind the point: how it stands on an axis."""
    return text.rstrip("0").rstrip(".") if "." in text and text[-1].isdigit() and "e" not in text else text


def tokens(count: float | None) -> str:
    """A mean number of tokens: whole from ten on, one digit behind the point below."""
    if count is None or math.isnan(count):
        return MISSING
    return f"{count:,.0f}" if count >= 9.95 else f"{count:.1f}"


def size(count: float | None) -> str:
    """Bytes with a binary unit: ``1536`` is ``1.5 KiB``."""
    if count is None or math.isnan(count):
        return MISSING
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
