"""The generic engine: any policy that does not evict, on any device, through the policies' own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtune.caching import AccessLog, Unit
from kvtune.capturing import loop
from kvtune.capturing.hook import Sink
from kvtune.capturing.loop import Session
from kvtune.models import LoadedModel, cached
from kvtune.policies.plan import Plan
from kvtune.runtime.attached import Attached
from kvtune.runtime.engine import EngineOptions, HeldBytes, Timings, dense_bytes, full_kv_bytes
from kvtune.runtime.forking import fork_index
from kvtune.runtime.hook import SparseAttention
from kvtune.runtime.sequence import LayerState
from kvtune.runtime.sequence import Sequence as LiveSequence


@dataclass(frozen=True)
class _Mark:
    """A place to come back to: the session's, the tokens that the plan has seen, and each layer's state."""

    place: loop.Mark
    passed: int
    built: bool
    layers: dict[int, LayerState]


class TorchEngine(Attached):
    """See :class:`kvtune.runtime.engine.Engine`. Keys and values stay where the model makes them.

    The block caches count and move nothing, so the bytes it reports are counted, not allocated. Stages are
    timed on a CPU only, where that costs nothing.
    """

    name = "torch"
    offload = "none"

    def __init__(self, loaded: LoadedModel, plan: Plan, options: EngineOptions) -> None:
        self.loaded = loaded
        self.plan = plan
        self.timings = Timings()
        self.notes: list[str] = []
        if options.offload != "none":
            self.notes.append(
                f"the torch engine leaves keys and values where they are: --offload {options.offload} "
                "has no effect"
            )
        self._options = options
        self._hook = SparseAttention(self._sequence())
        self.start()

    def attention(self, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        return self._hook(*arguments, **options)

    @property
    def length(self) -> int:
        return self._session.length

    @property
    def logits(self) -> Tensor:
        return self._session.logits

    @property
    def built(self) -> bool:
        return self._built

    def start(self) -> None:
        self._session = Session(self.loaded, room=self._options.longest)
        self._hook.sequence = self._sequence()
        self._passed, self._built = 0, False

    def feed(self, ids: Sequence[int], then_build: bool = False) -> None:
        if then_build and (self._built or self._hook.full):
            raise ValueError("the index is built already, or full attention runs")
        self._feed(ids)
        if then_build:
            self.build()

    def _feed(self, ids: Sequence[int]) -> None:
        if self._hook.full:
            self._session.feed(ids)
            return
        self._check_rewound()
        sequence = self._hook.sequence
        sequence.prefilling = True
        started = self._now()
        try:
            self._session.feed(ids)
        finally:
            sequence.prefilling = False
        self.timings.prefill.append(self._now() - started)
        self._passed = self.length

    def build(self) -> None:
        if self._built:
            raise ValueError("the index is built already")
        self._check_rewound()
        sequence = self._hook.sequence
        started = self._now()
        with torch.inference_mode(False), torch.no_grad():
            for number in self._sparse_layers():
                sequence.build(number, *self.keys_values(number))
        self.timings.index_build.append(self._now() - started)
        self._built = True

    def step(self, token: int) -> Tensor:
        full = self._hook.full
        if not full:
            self._check_rewound()
            if not self._built:
                self.build()
        started = self._now()
        self._session.feed([token])
        (self.timings.full_steps if full else self.timings.steps).append(self._now() - started)
        if not full:
            self._passed = self.length
            self.timings.stage_steps += self._hook.sequence.stages is not None
        return self.logits.float()

    @contextmanager
    def full_attention(self) -> Iterator[None]:
        self._hook.full = True
        try:
            yield
        finally:
            self._hook.full = False

    def showing(self, sink: Sink, first: int = 0) -> AbstractContextManager[None]:
        return self._hook.showing(sink, first)

    def keys_values(self, layer: int, start: int = 0) -> tuple[Tensor, Tensor]:
        keys, values = cached(self._session.cache, layer)
        return keys[:, start:], values[:, start:]

    def index(self, layer: int) -> Any:
        return fork_index(self._hook.sequence.layers[layer].index)

    def mark(self) -> _Mark:
        return _Mark(self._session.mark(), self._passed, self._built, self._hook.sequence.fork())

    def rewind(self, mark: _Mark) -> None:
        self._session.rewind(mark.place)
        self._passed, self._built = mark.passed, mark.built
        self._hook.sequence.layers = {number: state.fork() for number, state in mark.layers.items()}

    def measure_stages(self) -> None:
        """Nothing to do: on a CPU every step is timed by stage as it goes."""

    def access_log(self, sample: int = 0, timeline: int = 0) -> AccessLog:
        return self._hook.sequence.access_log(sample, timeline)

    def hit_masks(self, sample: int = 0, timeline: int = 0) -> dict[Unit, list[bool]]:
        return self._hook.sequence.hit_masks(sample, timeline)

    def counters(self) -> dict[str, tuple[int, int]]:
        return self._hook.sequence.counters()

    def held_bytes(self) -> HeldBytes:
        cache = index = buffers = steady = host = 0
        for number in range(self.loaded.geometry.n_layers):
            state = self._hook.sequence.layer(number)
            if state.index is None:
                steady += dense_bytes(state.info, self.length)
                continue
            page = state.info.page_bytes
            index += state.policy.index_bytes(state.index, state.info)
            steady += state.steady_pages * page
            buffers += state.retrieved_pages * page
            if any(block_cache.counters.requests[1] for block_cache in state.caches):
                cache += sum(block_cache.capacity for block_cache in state.caches) * page
                host += self.length * state.info.token_bytes * state.info.n_kv_heads
        full_kv = full_kv_bytes(self.loaded.geometry, self.length)
        return HeldBytes(cache, index, buffers, steady, host, full_kv, counted=True)

    def _sequence(self) -> LiveSequence:
        sequence = LiveSequence(self.plan, self.loaded.geometry, self._options.cache_fraction)
        if self.loaded.device.type == "cpu":
            sequence.stages = self.timings.stages
        return sequence

    def _sparse_layers(self) -> list[int]:
        layers = range(self.loaded.geometry.n_layers)
        return [number for number in layers if not self._hook.sequence.layer(number).dense]

    def _check_rewound(self) -> None:
        if self._passed != self.length:
            raise ValueError("what full attention has added must be rewound before the plan goes on")
