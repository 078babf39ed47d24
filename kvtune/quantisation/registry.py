"""The precisions by name, as the command line and profiles know them."""

from __future__ import annotations

from kvtune.errors import unknown
from kvtune.quantisation.base import Precision
from kvtune.quantisation.fp8 import FP8, FP8Unscaled
from kvtune.quantisation.int4 import Int4
from kvtune.quantisation.int8 import Int8
from kvtune.quantisation.kivi2 import Kivi2
from kvtune.quantisation.native import Native

_PRECISIONS: dict[str, Precision] = {
    precision.name: precision for precision in (Native(), FP8(), FP8Unscaled(), Int8(), Int4(), Kivi2())
}


def all_precisions() -> dict[str, Precision]:
    """Every precision by name, with its default parameters."""
    return dict(_PRECISIONS)


def get_precision(name: str) -> Precision:
    """The precision ``name``; ``InputError`` if there is none."""
    if name not in _PRECISIONS:
        raise unknown("precision", name, _PRECISIONS)
    return _PRECISIONS[name]
