"""Measures plans on recorded timelines, keeping layer outcomes between trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtune.analysis.checks import served_layers
from kvtune.analysis.recordings import Recordings
from kvtune.analysis.statistics import bootstrap_interval
from kvtune.caching import AccessLog, CacheResult, UnitAccesses, simulate
from kvtune.caching.tally import COLD, PAGE
from kvtune.policies.base import Policy
from kvtune.policies.plan import Plan
from kvtune.traces import Trace

Interval = tuple[float, float, float]
"""A value and the ends of its interval: (value, low, high)."""
DRAWS = 400


@dataclass(frozen=True)
class LayerOutcome:
    """One policy on one layer of one timeline.

    errors [T, Hq] relative output errors; read_bytes [T] summed over kv heads; accesses per kv head.
    """

    errors: NDArray[np.float32]
    read_bytes: NDArray[np.float64]
    accesses: tuple[UnitAccesses, ...]


@dataclass(frozen=True)
class Score:
    """A plan over all timelines and layers of a bench.

    Errors are pooled over the layers that a policy serves (those with a window of their own stay exact),
    steps and query heads; ``read_bytes_per_step`` is the mean over steps of the sum over all layers and kv
    heads; ``hit_ratio`` is page-weighted from an empty cache, ``None`` where nothing is cacheable.
    ``unit_errors`` holds the mean error of each (timeline, layer served), ``timeline_bytes`` the read bytes
    per step of each timeline.
    """

    error_mean: float
    error_p95: float
    read_bytes_per_step: float
    hit_ratio: float | None
    unit_errors: tuple[float, ...]
    timeline_bytes: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the keys of ``kvtune tune``."""
        return {
            "output_error": {"mean": self.error_mean, "p95": self.error_p95},
            "read_bytes_per_step": self.read_bytes_per_step,
            "hit_ratio": self.hit_ratio,
        }


class Bench(Recordings):
    """Timelines of some samples of a trace, and every outcome of a layer already measured on them."""

    def __init__(
        self, trace: Trace, samples: Sequence[int], layers: Sequence[int], device: str = "cpu"
    ) -> None:
        super().__init__(trace, samples, layers, device)
        self.served = served_layers(trace, self.layers)
        self._outcomes: dict[tuple[Any, ...], LayerOutcome] = {}

    def score(self, plan: Plan, cache_fraction: float) -> Score:
        """Measure ``plan`` with a wave buffer of ``cache_fraction``."""
        rows = self._rows(plan)
        served = self._served(rows)
        errors = np.concatenate([o.errors.ravel() for o in served])
        cached = self._simulated(rows, cache_fraction)
        step_bytes = [np.sum([o.read_bytes for o in row], axis=0) for row in rows]
        return Score(
            error_mean=float(errors.mean()),
            error_p95=float(np.quantile(errors, 0.95)),
            read_bytes_per_step=float(np.concatenate(step_bytes).mean()),
            hit_ratio=None if cached is None else cached.hit_ratio.page,
            unit_errors=tuple(float(o.errors.mean()) for o in served),
            timeline_bytes=tuple(float(b.mean()) for b in step_bytes),
        )

    def first_bytes(self, plan: Plan) -> float:
        """Read bytes per step on the first timeline: a cheap look before the whole is measured."""
        return float(np.sum([self.outcome(plan, 0, n).read_bytes for n in self.layers], axis=0).mean())

    def intervals(self, plan: Plan, cache_fraction: float, seed: int = 0) -> dict[str, Interval]:
        """95% bootstrap intervals of a plan's score, resampling (timeline, layer served) units.

        Keys: ``error_mean``, ``error_p95``, ``read_bytes_per_step`` (resampling timelines) and, where
        something is cacheable, ``hit_ratio``; values (value, low, high).
        """
        score = self.score(plan, cache_fraction)
        rows = self._rows(plan)
        units = [o.errors.ravel().astype(np.float64) for o in self._served(rows)]
        random = np.random.default_rng(seed)
        tails = [
            np.quantile(
                np.concatenate([units[i] for i in random.integers(len(units), size=len(units))]), 0.95
            )
            for _ in range(DRAWS)
        ]
        sums, counts = [u.sum() for u in units], [u.size for u in units]
        found = {
            "error_mean": _around(score.error_mean, bootstrap_interval(sums, counts, seed=seed)),
            "error_p95": _around(score.error_p95, tuple(np.quantile(tails, [0.025, 0.975]))),
            "read_bytes_per_step": _around(
                score.read_bytes_per_step, bootstrap_interval(score.timeline_bytes, seed=seed)
            ),
        }
        cached = self._simulated(rows, cache_fraction)
        if cached is not None:
            tallies = [unit.tally for unit in cached.units.values()]
            hits, pages = [t.hits[0, COLD, PAGE] for t in tallies], [t.accesses[COLD, PAGE] for t in tallies]
            interval = bootstrap_interval(hits, pages, seed=seed)
            found["hit_ratio"] = _around(cached.hit_ratio.page, interval)
        return found

    def outcome(self, plan: Plan, timeline: int, layer: int) -> LayerOutcome:
        """One layer of one timeline under ``plan``, measured once."""
        policy = plan.for_layer(self.trace.layer_info(layer))
        key = (policy, timeline, layer)
        if key not in self._outcomes:
            self._outcomes[key] = self._measure(policy, timeline, layer)
        return self._outcomes[key]

    def _measure(self, policy: Policy, timeline: int, layer: int) -> LayerOutcome:
        result = self.evaluate(policy, timeline, layer)
        return LayerOutcome(
            errors=result.error.numpy().astype(np.float32),
            read_bytes=result.read_bytes.sum(1).numpy().astype(np.float64),
            accesses=tuple(result.accesses),
        )

    def _rows(self, plan: Plan) -> list[list[LayerOutcome]]:
        """Outcomes by timeline and layer."""
        return [[self.outcome(plan, i, layer) for layer in self.layers] for i in range(len(self.timelines))]

    def _served(self, rows: list[list[LayerOutcome]]) -> list[LayerOutcome]:
        """The outcomes, timeline by timeline, of layers that a policy serves."""
        return [o for row in rows for layer, o in zip(self.layers, row) if layer in self.served]

    def _simulated(self, rows: list[list[LayerOutcome]], cache_fraction: float) -> CacheResult | None:
        """The wave buffer on all accesses; ``None`` where nothing is cacheable."""
        log = AccessLog(page_bytes=self.trace.geometry.layer(0).page_bytes)
        for timeline, row in enumerate(rows):
            for layer, outcome in zip(self.layers, row):
                for head, accesses in enumerate(outcome.accesses):
                    if len(accesses.blocks):
                        log.units[0, timeline, layer, head] = accesses
        return simulate(log, [cache_fraction], "wave")[0] if log.units else None


def _around(value: float, interval: tuple[float, float]) -> Interval:
    """The interval widened to hold its value; the value alone where nothing could be resampled."""
    low, high = (float(end) for end in interval)
    return (value, value, value) if math.isnan(low) else (value, min(low, value), max(high, value))
