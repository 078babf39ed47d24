"""Statistics of measured values: streaming distributions and bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

DRAWS = 2000
LEVEL = 0.95


@dataclass
class Distribution:
    """Mean and quantiles of values that arrive in pieces; NaN (not measurable) is left out.

    Count, mean, minimum and maximum are exact. Quantiles are exact up to ``capacity`` values; beyond that
    they come from a uniform sample of ``capacity`` values, chosen by seeded random keys (the values with
    the smallest keys stay), so that equal input in equal order gives equal output.
    """

    capacity: int = 1 << 17
    seed: int = 0
    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    _values: Floats = field(default_factory=lambda: np.zeros(0), repr=False)
    _keys: Floats = field(default_factory=lambda: np.zeros(0), repr=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def add(self, values: ArrayLike) -> None:
        """Add values of any shape."""
        new = np.asarray(values, dtype=np.float64).ravel()
        new = new[~np.isnan(new)]
        if not len(new):
            return
        self.count += len(new)
        self.total += float(new.sum())
        self.low = min(self.low, float(new.min()))
        self.high = max(self.high, float(new.max()))
        self._values = np.concatenate([self._values, new])
        self._keys = np.concatenate([self._keys, self._random.random(len(new))])
        if len(self._values) > self.capacity:
            kept = np.argpartition(self._keys, self.capacity - 1)[: self.capacity]
            self._values, self._keys = self._values[kept], self._keys[kept]

    @property
    def mean(self) -> float:
        """NaN without values."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The ``share`` quantile (linear interpolation); NaN without values."""
        return float(np.quantile(self._values, share)) if len(self._values) else math.nan


def bootstrap_interval(
    sums: ArrayLike,
    counts: ArrayLike | None = None,
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean, resampling whole groups.

    ``sums`` [g] and ``counts`` [g] are each group's sum and number of values: values of one group (the
    steps of one sample) depend on each other, so groups are drawn, not values. Without ``counts`` every
    entry of ``sums`` is a value of its own. The interval holds the central ``level`` of the means of
    ``draws`` resamples (Efron 1979). NaN twice for fewer than two groups with values, where nothing can
    be resampled.
    """
    totals = np.asarray(sums, dtype=np.float64).ravel()
    sizes = np.ones_like(totals) if counts is None else np.asarray(counts, dtype=np.float64).ravel()
    used = (sizes > 0) & ~np.isnan(totals)
    totals, sizes = totals[used], sizes[used]
    if len(totals) < 2:
        return math.nan, math.nan
    random = np.random.default_rng(seed)
    means = np.empty(draws)
    block = max(1, (1 << 22) // len(totals))
    for start in range(0, draws, block):
        stop = min(start + block, draws)
        chosen = random.integers(0, len(totals), (stop - start, len(totals)))
        means[start:stop] = totals[chosen].sum(1) / sizes[chosen].sum(1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def group_sums(values: ArrayLike, groups: Sequence[int] | NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Sum and number of the values (NaN left out) of each group, groups ascending: input of the bootstrap."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    present = ~np.isnan(flat)
    size = int(index.max()) + 1 if len(index) else 0
    sums = np.bincount(index[present], flat[present], size).astype(np.float64)
    counts = np.bincount(index[present], minlength=size).astype(np.float64)
    return sums, counts


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's ρ of paired values: the correlation of their ranks, equal values sharing the mean rank.

    NaN for fewer than three pairs, or where all values of one side are equal.
    """
    a, b = _ranks(np.asarray(first, np.float64)), _ranks(np.asarray(second, np.float64))
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Floats) -> Floats:
    """Ranks 0…n-1; ties get the mean of the ranks they take up."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: Floats = (ends - 1 + ends - counts) / 2
    return means[group]
