"""Stage constants from timings: least squares on the relative error, no constant below zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from kvtune.errors import InputError
from kvtune.hardware.cost import Features
from kvtune.hardware.machine import Stage, Stages

Array = NDArray[np.float64]

_NOTHING = 1e-18
"""Seconds a byte below which bytes do not matter."""


@dataclass(frozen=True)
class Sample:
    """One timing of a stage."""

    features: Features
    seconds: float


def fit_stage(samples: Sequence[Sample]) -> Stage:
    """``seconds ≈ fixed + bytes · b + entries · c`` with no constant below 0.

    Minimises Σ (predicted ÷ measured − 1)², exactly: every subset of the constants is tried, at most eight.
    A feature that is the same in all samples tells nothing apart from ``fixed`` and is left out. Raises
    ``InputError`` without samples, or for a time that is not above 0.
    """
    seconds = np.array([sample.seconds for sample in samples], np.float64)
    if not len(seconds):
        raise InputError("a stage cannot be fitted without samples")
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise InputError("a stage cannot be fitted to a time that is not above 0")
    columns = as_columns(sample.features for sample in samples)
    useful = useful_columns(columns)
    relative = columns[:, useful] / seconds[:, None]
    found = np.zeros(3)
    found[useful] = nonnegative_least_squares(relative, np.ones(len(seconds)))
    errors = columns @ found / seconds - 1
    return as_stage(found, len(samples), float(np.abs(errors).max()))


def as_columns(features: Iterable[Features]) -> Array:
    """What the three constants are multiplied with, [n, 3]: 1, bytes, entries."""
    return np.array([[1.0, one.bytes, one.entries] for one in features]).reshape(-1, 3)


def useful_columns(columns: Array) -> list[int]:
    """The first, and those of the others that are not the same everywhere."""
    return [0, *(column for column in (1, 2) if np.ptp(columns[:, column]) > 0)]


def as_stage(constants: Array, samples: int, worst_error: float) -> Stage:
    """A stage of fitted constants: seconds, seconds a byte, seconds an entry."""
    fixed, byte, entry = constants.tolist()
    return Stage(
        fixed_us=fixed * 1e6,
        bytes_per_second=1 / byte if byte > _NOTHING else None,
        ns_per_entry=entry * 1e9,
        samples=samples,
        worst_error=worst_error,
    )


def fit_stages(
    samples: Mapping[str, Sequence[Sample]],
    estimation: str | None = None,
    known: Mapping[str, Stage] | None = None,
) -> Stages:
    """One fit a stage; those ``known`` already are taken as they are, and any without samples stays open.

    ``estimation`` says where estimates are made (see :class:`~kvtune.hardware.machine.Stages`); by default
    in the attention where that has samples and estimating has none. Raises ``InputError`` as
    :func:`fit_stage`, and for a name that is no stage's.
    """
    known = known or {}
    unknown = sorted((set(samples) | set(known)) - (set(Stages.model_fields) - {"estimation"}))
    if unknown:
        raise InputError(f"there is no stage '{unknown[0]}'")
    fitted = {name: fit_stage(timed) for name, timed in samples.items() if timed and name not in known}
    fitted.update(known)
    if estimation is None:
        estimation = "in_attend" if "attend" in fitted and "estimate" not in fitted else "beside_fetch"
    return Stages.model_validate({"estimation": estimation, **fitted})


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """argmin ‖matrix · x − target‖ over x ≥ 0 for a matrix of few columns, [n, k] and [n] → [k].

    The best of the unconstrained solutions on all subsets of the columns that come out non-negative: one of
    them is the optimum.
    """
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    best, least = np.zeros(matrix.shape[1]), float(target @ target)
    for subset in _subsets(matrix.shape[1]):
        chosen = list(subset)
        solution = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
        if (solution < 0).any():
            continue
        residual = scaled[:, chosen] @ solution - target
        if float(residual @ residual) < least:
            least = float(residual @ residual)
            best = np.zeros(matrix.shape[1])
            best[chosen] = solution
    return best / scale


def _subsets(count: int) -> Iterable[tuple[int, ...]]:
    """Non-empty subsets of the columns, the small ones first: of equal fits the simplest stays."""
    return (subset for size in range(1, count + 1) for subset in combinations(range(count), size))
