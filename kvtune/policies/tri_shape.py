"""Tri-shape: A-shape whose last prompt queries attend densely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvtune.policies.a_shape import AShape
from kvtune.policies.base import check


@dataclass(frozen=True)
class TriShape(AShape):
    """A-shape (``sink`` 128, ``recent`` 3968), but the last ``n_last`` (100) prompt queries attend all keys.

    ``n_last`` acts in prefill alone (:func:`kvtune.analysis.prefill.prefill_pattern_error`); a decode step
    attends as under ``a_shape``. SCBench decodes densely after a tri-shape prefill: to model that, measure
    the pattern and leave the policy at ``full``.
    """

    n_last: int = 100

    name: ClassVar[str] = "tri_shape"
    title: ClassVar[str] = "Tri-shape"
    source: ClassVar[str] = "Li et al., SCBench, arXiv 2412.10319; microsoft/MInference"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.n_last >= 0, self, f"n_last must be 0 or more, not {self.n_last}")
