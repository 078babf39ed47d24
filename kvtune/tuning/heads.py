"""Budgets of single kv heads: the splits of a layer's bytes over its heads that are worth their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.tuning.ladder import Setting


@dataclass(frozen=True)
class Measured:
    """One setting of one layer: read bytes per step and loss of each kv head [H], which sum to its own."""

    setting: Setting
    read_bytes: NDArray[np.float64]
    loss: NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """Which of some measured settings each kv head takes, and what that costs and loses."""

    heads: tuple[int, ...]
    read_bytes: float
    loss: float


def splits(measured: Sequence[Measured]) -> list[Split]:
    """The splits of least loss at their bytes, from the cheapest on; each gives one head more than the last.

    Every head walks along the lower convex hull of its own (bytes, loss); the steepest step of any head comes
    first. No other split loses less at no more bytes than one of these, unless it lies between two of them.
    """
    read = np.stack([each.read_bytes for each in measured])
    loss = np.stack([each.loss for each in measured])
    hulls = [_hull(read[:, head], loss[:, head]) for head in range(read.shape[1])]
    steps = sorted(
        ((loss[b, head] - loss[a, head]) / (read[b, head] - read[a, head]), head, place)
        for head, hull in enumerate(hulls)
        for place, (a, b) in enumerate(itertools.pairwise(hull), 1)
    )
    at = [hull[0] for hull in hulls]
    found = []
    for head, place in [(0, 0), *((head, place) for _, head, place in steps)]:
        at[head] = hulls[head][place]
        every = np.arange(len(at))
        found.append(Split(tuple(at), float(read[at, every].sum()), float(loss[at, every].sum())))
    return found


def _hull(read: NDArray[np.float64], loss: NDArray[np.float64]) -> list[int]:
    """Points on the falling part of the lower convex hull, from the cheapest to the one of least loss."""
    hull: list[int] = []
    for point in np.lexsort((loss, read)).tolist():
        if hull and loss[point] >= loss[hull[-1]]:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], point, read, loss):
            hull.pop()
        hull.append(point)
    return hull


def _above(a: int, b: int, c: int, read: NDArray[np.float64], loss: NDArray[np.float64]) -> bool:
    """Whether point b lies on or above the line from a to c."""
    return bool((loss[b] - loss[a]) * (read[c] - read[a]) >= (loss[c] - loss[a]) * (read[b] - read[a]))
