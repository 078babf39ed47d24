"""Measurements gathered over all samples: distributions per metric, lag and layer, and the JSON document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtune.analysis.metrics import Observations
from kvtune.analysis.statistics import Distribution, bootstrap_interval

Key = tuple[str, int | None]
"""A metric and its lag (``None`` where it has none)."""

MIN_SAMPLES = 5
"""Fewer samples give no interval: a bootstrap over so few is far too narrow."""
_LAYER_VALUES = 1 << 15


_OF_POLICY = frozenset({"recall_index", "recall_attention", "mass", "error", "effective_tokens"})


class Summary:
    """Streams observations into distributions: over everything, and per layer."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.layers: list[int] = []
        self._whole: dict[Key, Distribution] = defaultdict(lambda: Distribution(seed=seed))
        self._layer: dict[tuple[int, Key], Distribution] = defaultdict(
            lambda: Distribution(capacity=_LAYER_VALUES, seed=seed)
        )
        self._turn: dict[tuple[int, Key], Distribution] = defaultdict(
            lambda: Distribution(capacity=_LAYER_VALUES, seed=seed)
        )
        self._samples: dict[Key, dict[int, list[float]]] = defaultdict(
            lambda: defaultdict(lambda: [0.0, 0.0])
        )

    def add(self, sample: int, layer: int, observations: Sequence[Observations], served: bool = True) -> None:
        """Add what one layer of a timeline gave. A policy's quality in a layer that it does not ``serve``
        counts in that layer alone."""
        if layer not in self.layers:
            self.layers = sorted([*self.layers, layer])
        for seen in observations:
            key, values = (seen.metric, seen.lag), seen.values.double().numpy()
            self._layer[layer, key].add(values)
            if not served and seen.metric in _OF_POLICY:
                continue
            self._whole[key].add(values)
            for turn in seen.turns.unique().tolist():
                self._turn[turn, key].add(values[seen.turns.numpy() == turn])
            group = self._samples[key][sample]
            group[0] += float(np.nansum(values))
            group[1] += float((~np.isnan(values)).sum())

    def of(self, metric: str, lag: int | None = None, layer: int | None = None) -> Distribution:
        """All values of a metric, in one layer or over all; empty if it was never measured."""
        key = (metric, lag)
        found = self._whole.get(key) if layer is None else self._layer.get((layer, key))
        return Distribution() if found is None else found

    def of_turn(self, metric: str, turn: int) -> Distribution:
        """All values of a metric without lag in one turn."""
        return self._turn.get((turn, (metric, None)), Distribution())

    def turns(self) -> list[int]:
        return sorted({turn for turn, _ in self._turn})

    def lags(self, metric: str) -> list[int]:
        """The lags at which ``metric`` was measured, ascending."""
        return sorted(lag for name, lag in self._whole if name == metric and lag is not None)

    def interval(self, metric: str, lag: int | None = None) -> tuple[float, float] | None:
        """95% bootstrap interval of the mean over samples; ``None`` below five samples."""
        groups = [group for group in self._samples[metric, lag].values() if group[1]]
        if len(groups) < MIN_SAMPLES:
            return None
        sums, counts = zip(*groups)
        return bootstrap_interval(sums, counts, seed=self.seed)


def measures(summary: Summary, layer: int | None = None) -> dict[str, Any]:
    """The document's measures, over everything or of one layer (same keys).

    Numbers are means where nothing else is said. ``read_bytes_per_step`` adds up the kv heads, and over
    everything also the layers; ``effective_tokens`` is per kv head. Recall, mass, error and effective
    tokens over everything leave out layers with a window, which stay dense. NaN where nothing was measured.
    """

    def spread(metric: str, *names: str, lag: int | None = None) -> dict[str, float]:
        found = summary.of(metric, lag, layer)
        values = {"mean": found.mean, **{name: found.quantile(int(name[1:]) / 100) for name in names}}
        interval = summary.interval(metric, lag) if layer is None else None
        return values if interval is None else values | {"low": interval[0], "high": interval[1]}

    def by_lag(metric: str, *names: str) -> dict[str, dict[str, float]]:
        return {f"lag{lag}": spread(metric, *names, lag=lag) for lag in summary.lags(metric)}

    overlap = by_lag("overlap", "p10", "p50", "p90")
    for lag in summary.lags("overlap"):
        overlap[f"lag{lag}"]["chance"] = summary.of("overlap_chance", lag, layer).mean
    sets = {str(width): summary.of("working_set", width, layer).mean for width in summary.lags("working_set")}
    neighbours = spread("layer_overlap")
    neighbours["chance"] = summary.of("layer_overlap_chance", None, layer).mean
    return {
        "query_cosine": by_lag("query_cosine", "p10", "p50", "p90"),
        "overlap_at_100": overlap,
        "neighbour_layer_overlap_at_100": neighbours,
        "working_set_at_100": sets,
        "entropy": spread("entropy", "p10", "p50", "p90"),
        "tokens_for_mass": {
            share: summary.of(f"tokens_{share}", None, layer).mean for share in ("90", "95", "99")
        },
        "token_share_for_mass_95": spread("token_share_95", "p50", "p90"),
        "zone_mass": {
            zone: summary.of(f"{zone}_mass", None, layer).mean for zone in ("sink", "local", "late")
        },
        "recall_at_100": {
            kind: summary.of(f"recall_{kind}", None, layer).mean for kind in ("index", "attention")
        },
        "attention_mass": spread("mass", "p10"),
        "output_error": spread("error", "p50", "p95"),
        "output_error_without_estimation": spread("error_without_estimation", "p50", "p95"),
        "visible_tokens": summary.of("visible_tokens", None, layer).mean,
        "effective_tokens": summary.of("effective_tokens", None, layer).mean,
    }


def bytes_per_step(summary: Summary, kv_heads: int, layer: int | None = None) -> dict[str, float]:
    """Bytes read per decode step over ``kv_heads`` heads, of one layer or all: policy, its scan, full."""
    layers = summary.layers if layer is None else [layer]
    names = {
        "read_bytes_per_step": "read_bytes",
        "scan_bytes_per_step": "scan_bytes",
        "full_read_bytes_per_step": "full_read_bytes",
    }
    return {
        key: float(sum(summary.of(metric, None, number).mean for number in layers)) * kv_heads
        for key, metric in names.items()
    }
