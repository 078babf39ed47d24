"""One policy at one setting over all recorded timelines: what a comparison puts side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvtune.analysis.checks import served_layers
from kvtune.analysis.evaluate import LayerEvaluation, chunks, decode_queries, evaluate
from kvtune.analysis.recordings import Recordings
from kvtune.analysis.statistics import Distribution
from kvtune.policies.base import Policy
from kvtune.policies.full import Full
from kvtune.policies.plan import Plan
from kvtune.traces import Trace

Floats = NDArray[np.float64]
_QUALITIES = {
    "error": "error",
    "mass": "mass",
    "index": "recall_index",
    "attention": "recall_attention",
    "tokens": "effective_tokens",
}
"""Distributions of a row, and the columns of an evaluation that they gather."""


class Comparison(Recordings):
    """Everything a comparison measures, on all samples of ``trace`` and some of its layers.

    Timelines without decode steps are left out. Windowed layers keep full attention under every policy:
    they count in the bytes, not in what is said of its quality.
    """

    def __init__(self, trace: Trace, layers: Sequence[int], seed: int = 0, device: str = "cpu") -> None:
        super().__init__(trace, range(trace.n_samples), layers, device)
        self.timelines = [timeline for timeline in self.timelines if timeline.turns]
        self.seed = seed
        self.served = served_layers(trace, layers)
        self._read: dict[tuple[Policy, int, int], Floats] = {}

    @property
    def longest(self) -> int:
        """Tokens of the longest timeline."""
        return max(len(timeline) for timeline in self.timelines)

    def read_bytes(self, policy: Policy) -> float:
        """Bytes that ``policy`` reads per decode step over all layers and kv heads, without attending."""
        return self._bytes(policy, self.layers)

    def fixed_bytes(self) -> float:
        """Bytes that every policy reads per decode step: those of the layers that none can serve."""
        return self._bytes(Full(), [layer for layer in self.layers if layer not in self.served])

    def _bytes(self, policy: Policy, layers: Sequence[int]) -> float:
        if not layers:
            return 0.0
        plan = Plan(policy)
        steps = [
            np.sum([self._layer_bytes(plan, timeline, layer) for layer in layers], axis=0)
            for timeline in range(len(self.timelines))
        ]
        return float(np.concatenate(steps).mean())

    def _layer_bytes(self, plan: Plan, timeline: int, layer: int) -> Floats:
        """Bytes read at each step in one layer, [T]."""
        policy = plan.for_layer(self.trace.layer_info(layer))
        key = (policy, timeline, layer)
        if key not in self._read:
            vectors = self.vectors(timeline, layer)
            steps = decode_queries(vectors)
            index = self.index(policy, timeline, layer).index
            parts = [
                policy.select(index, steps.queries[c], steps.positions[c]).read_bytes(vectors.info).sum(1)
                for c in chunks(len(steps.positions))
            ]
            self._read[key] = np.concatenate([part.cpu().numpy().astype(np.float64) for part in parts])
        return self._read[key]

    def measure(self, policy: Policy) -> dict[str, Any]:
        """The measures of one policy (see :func:`kvtune.analysis.compare.compare`)."""
        plan, tally = Plan(policy), _Tally(self.seed)
        for timeline in range(len(self.timelines)):
            found = []
            for layer in self.layers:
                info = self.trace.layer_info(layer)
                served = plan.for_layer(info)
                built = self.index(served, timeline, layer)
                tally.index_bytes += served.index_bytes(built.index, info)
                found.append(self.evaluate(served, timeline, layer, built=built, recall=True))
            self._add(tally, timeline, found)
        return tally.row(len(self.timelines))

    def measure_stored(self, precision: str) -> dict[str, Any]:
        """The measures of full attention over a cache held in ``precision``."""
        tally = _Tally(self.seed)
        for timeline, recorded in enumerate(self.timelines):
            found = [
                evaluate(
                    Full(),
                    self.vectors(timeline, layer),
                    recorded.prompt_length,
                    truth=self.truth(timeline, layer),
                    precision=precision,
                )
                for layer in self.layers
            ]
            self._add(tally, timeline, found)
        return tally.row(len(self.timelines))

    def _add(self, tally: _Tally, timeline: int, found: Sequence[LayerEvaluation]) -> None:
        turns = decode_queries(self.vectors(timeline, self.layers[0])).turns.cpu().numpy()
        served = [result for result in found if result.layer.layer in self.served]
        tally.add(self.timelines[timeline].request, turns, found, served)


class _Group:
    """Values of the steps of one turn, or of all."""

    def __init__(self, seed: int) -> None:
        self.qualities = {name: Distribution(seed=seed) for name in _QUALITIES}
        self.read: list[Floats] = []
        self.scan: list[Floats] = []

    def measures(self) -> dict[str, Any]:
        values = self.qualities
        return {
            "recall_at_100": {kind: values[kind].mean for kind in ("index", "attention")},
            "attention_mass": {"mean": values["mass"].mean},
            "output_error": {"mean": values["error"].mean, "p95": values["error"].quantile(0.95)},
            "effective_tokens": values["tokens"].mean,
            "read_bytes_per_step": float(np.concatenate(self.read).mean()),
            "scan_bytes": float(np.concatenate(self.scan).mean()),
        }


class _Tally:
    """Evaluations of all timelines, gathered over everything and by (request, turn)."""

    def __init__(self, seed: int) -> None:
        self.index_bytes = 0
        self.build_seconds = 0.0
        self.whole = _Group(seed)
        self.turns: dict[tuple[int, int], _Group] = defaultdict(lambda: _Group(seed))

    def add(
        self,
        request: int,
        turns: NDArray[np.int64],
        found: Sequence[LayerEvaluation],
        served: Sequence[LayerEvaluation],
    ) -> None:
        """All layers of one timeline, whose steps lie in ``turns`` [T]; quality is that of the ``served``."""
        self.build_seconds += sum(result.build_seconds for result in found)
        read = np.sum([_over_heads(result.read_bytes) for result in found], axis=0)
        scan = np.sum([_over_heads(result.scan_bytes) for result in found], axis=0)
        parts = [(self.whole, np.ones(len(turns), dtype=bool))]
        parts += [(self.turns[request, turn], turns == turn) for turn in np.unique(turns).tolist()]
        for group, steps in parts:
            group.read.append(read[steps])
            group.scan.append(scan[steps])
            for result in served:
                for name, column in _QUALITIES.items():
                    group.qualities[name].add(getattr(result, column).double().numpy()[steps])

    def row(self, timelines: int) -> dict[str, Any]:
        """The measures of a row; index bytes and build seconds are those of one timeline, on average."""
        return {
            **self.whole.measures(),
            "index_bytes": self.index_bytes / timelines,
            "build_seconds": self.build_seconds / timelines,
            "by_turn": [
                {
                    "request": request,
                    "turn": turn,
                    "steps": sum(map(len, group.read)),
                    **group.measures(),
                }
                for (request, turn), group in sorted(self.turns.items())
            ],
        }


def _over_heads(values: Tensor) -> Floats:
    """[T, H] summed over kv heads, [T]."""
    return values.sum(1).double().numpy()
