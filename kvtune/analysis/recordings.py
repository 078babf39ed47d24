"""Timelines of a trace with what has been computed on them, so that many policies can be tried."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvtune.analysis.evaluate import LayerEvaluation, LayerTruth, build_index, evaluate, layer_truth
from kvtune.devices import choose_device, seconds_at_rest
from kvtune.policies.base import Policy
from kvtune.traces import Timeline, TimelineLayer, Trace

INDEXES_PER_LAYER = 4
INDEX_BYTES = 8 << 30
VECTOR_BYTES = 2 << 30


@dataclass(frozen=True)
class BuiltIndex:
    """A policy's index over a whole timeline, the seconds that building it took, and the bytes it holds."""

    index: Any
    seconds: float
    held: int


class Recordings:
    """Timelines of some samples of a trace; references, indexes and vectors stay between measurements.

    References (full attention) are small and kept for good. Indexes are shared by policies of one name and
    ``build_key``, and kept up to ``INDEXES_PER_LAYER`` and ``INDEX_BYTES``, the layers' vectors up to
    ``VECTOR_BYTES``, least recently used first out. A policy that evicts starts over from the prompt at its
    first step, so it shares an index like any other. Everything is computed on ``device``; results come
    back to the CPU.
    """

    def __init__(
        self, trace: Trace, samples: Sequence[int], layers: Sequence[int], device: str = "cpu"
    ) -> None:
        self.trace = trace
        self.device = choose_device(device)
        self.layers = tuple(layers)
        self.timelines: list[Timeline] = [t for s in samples for t in trace.timelines(s)]
        self._truths: dict[tuple[int, int], LayerTruth] = {}
        self._indexes: OrderedDict[tuple[Any, ...], BuiltIndex] = OrderedDict()
        self._vectors: OrderedDict[tuple[int, int], TimelineLayer] = OrderedDict()

    @property
    def context_tokens(self) -> tuple[int, int]:
        """Shortest and longest prompt."""
        lengths = [t.prompt_length for t in self.timelines]
        return min(lengths), max(lengths)

    def vectors(self, timeline: int, layer: int) -> TimelineLayer:
        """The vectors of one layer, kept while there is room."""
        key = (timeline, layer)
        if key not in self._vectors:
            self._vectors[key] = self.timelines[timeline].layer(layer).to(self.device)
        self._vectors.move_to_end(key)
        vectors = self._vectors[key]
        held = sum(t.nbytes for t in (vectors.keys, vectors.values, vectors.queries))
        while len(self._vectors) * held > VECTOR_BYTES and len(self._vectors) > 1:
            self._vectors.popitem(last=False)
        return vectors

    def truth(self, timeline: int, layer: int) -> LayerTruth:
        """Full attention of every decode step, computed once."""
        if (timeline, layer) not in self._truths:
            self._truths[timeline, layer] = layer_truth(self.vectors(timeline, layer))
        return self._truths[timeline, layer]

    def index(self, policy: Policy, timeline: int, layer: int) -> BuiltIndex:
        """The policy's index over the whole timeline; an earlier one where that is the same."""
        key = (policy.name, *policy.build_key(), timeline, layer)
        if key not in self._indexes:
            self._indexes[key] = self._build(policy, timeline, layer)
            self._make_room()
        self._indexes.move_to_end(key)
        return self._indexes[key]

    def evaluate(
        self,
        policy: Policy,
        timeline: int,
        layer: int,
        *,
        built: BuiltIndex | None = None,
        recall: bool = False,
    ) -> LayerEvaluation:
        """``policy`` on the decode steps of one layer (see :func:`kvtune.analysis.evaluate.evaluate`)."""
        built = built or self.index(policy, timeline, layer)
        found = evaluate(
            policy,
            self.vectors(timeline, layer),
            self.timelines[timeline].prompt_length,
            index=built.index,
            truth=self.truth(timeline, layer),
            recall=recall,
        )
        return replace(found, build_seconds=built.seconds)

    def _build(self, policy: Policy, timeline: int, layer: int) -> BuiltIndex:
        vectors = self.vectors(timeline, layer)
        started = seconds_at_rest(self.device)
        index = build_index(policy, vectors, self.timelines[timeline].prompt_length)
        return BuiltIndex(index, seconds_at_rest(self.device) - started, _tensor_bytes(index))

    def _make_room(self) -> None:
        """Drop the indexes used longest ago, the newest never."""
        limit = INDEXES_PER_LAYER * len(self.timelines) * len(self.layers)
        held = sum(built.held for built in self._indexes.values())
        while len(self._indexes) > 1 and (len(self._indexes) > limit or held > INDEX_BYTES):
            _, dropped = self._indexes.popitem(last=False)
            held -= dropped.held


def _tensor_bytes(value: Any, depth: int = 3) -> int:
    """Bytes of the tensors that ``value`` holds, itself or in its attributes and lists, ``depth`` deep."""
    if isinstance(value, Tensor):
        return value.nbytes
    inside = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    return sum(_tensor_bytes(item, depth - 1) for item in inside) if depth else 0
