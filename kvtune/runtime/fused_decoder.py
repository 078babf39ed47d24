"""A model's decode step through fused layers: one CUDA graph for B sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvtune.caching import AccessLog, Unit, UnitAccesses
from kvtune.models import LoadedModel, PassingCache, decode_step
from kvtune.policies.plan import Plan
from kvtune.runtime.block_cache import Counters, count_only
from kvtune.runtime.engine import HeldBytes, full_kv_bytes
from kvtune.runtime.fused_layer import FusedLayer, LayerStore
from kvtune.runtime.fused_methods import fused_layer
from kvtune.runtime.fused_offload import FusedWaveOffload

KeysValues = Callable[[int, int], tuple[Tensor, Tensor]]
"""``(layer, sequence) -> keys [H, N, d], values [H, N, dv]`` of a prompt."""


class FusedDecoder:
    """Decodes B sequences, a token of each at a step. Called as the model's attention function.

    ``new_tokens`` bounds the tokens after the prompts, ``log_steps`` the steps whose accesses are noted (0:
    none are). Use :meth:`start` before the first :meth:`step`, with the model's attention going through this
    object (``attention_through``).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        *,
        new_tokens: int,
        offload: str = "none",
        cache_fraction: float = 0.05,
        log_steps: int = 0,
        make: Callable[..., FusedLayer] = fused_layer,
    ) -> None:
        self.loaded, self.plan = loaded, plan
        self.new_tokens, self.log_steps = new_tokens, log_steps
        self.layers: list[FusedLayer] = []
        self.notes: list[str] = []
        self._make = lambda info: make(plan.for_layer(info), info, new_tokens, offload, cache_fraction)
        self._cache = PassingCache()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._attend: Callable[[int, Tensor, Tensor, Tensor], Tensor] = self._attend_layer

    def start(
        self,
        prompts: KeysValues,
        lengths: Sequence[int],
        prompt_queries: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        """Take over prompts of ``lengths`` tokens and build every layer's index."""
        self.prepare(lengths)
        for number in range(self.loaded.geometry.n_layers):
            self.build_layer(number, prompts, prompt_queries)
        self.finish()

    def prepare(self, lengths: Sequence[int]) -> None:
        """Make ready for prompts of ``lengths`` tokens; then :meth:`build_layer` each and :meth:`finish`."""
        device = self.loaded.device
        self.lengths = list(lengths)
        batch = len(lengths)
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._positions = torch.tensor(self.lengths, dtype=torch.int64, device=device)[:, None]
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self.steps = 0
        self.layers, self._graph = [], None

    def rows(self, lengths: Sequence[int]) -> int:
        """The most rows that a layer's store has a sequence, for prompts of ``lengths`` tokens."""
        geometry = self.loaded.geometry
        layers = (self._make(geometry.layer(number)) for number in range(geometry.n_layers))
        return max(layer.room(lengths, self.new_tokens) for layer in layers)

    def build_layer(
        self,
        number: int,
        prompts: KeysValues,
        prompt_queries: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        """Take over the prompts of layer ``number``, the next in order, and build its index.

        Launches on the current stream; the host does not wait for a GPU. ``ValueError`` out of order.
        """
        if number != len(self.layers):
            raise ValueError(f"layer {len(self.layers)} is to be built next, not {number}")
        info, batch = self.loaded.geometry.layer(number), len(self.lengths)
        layer = self._make(info)
        rows = layer.room(self.lengths, self.new_tokens)
        store = LayerStore.empty(info, batch, rows, self.loaded.model.dtype, self.loaded.device)
        for sequence, length in enumerate(self.lengths):
            store.put(sequence, 0, *prompts(number, sequence))
            store.lengths[sequence] = length
        window = layer_window(self.plan, number, self.loaded)
        seen = None
        if prompt_queries is not None and window:
            seen = [prompt_queries(number, sequence) for sequence in range(batch)]
        layer.build(store, seen)
        if self.log_steps:
            layer.log = layer.new_log(self._at, self.log_steps)
        self.layers.append(layer)

    def finish(self) -> None:
        """What the host does once all layers are built: it may wait for them."""
        for layer in self.layers:
            layer.finish()

    def capture(self) -> None:
        """Record the step as a CUDA graph (on a GPU); without this it runs kernel by kernel.

        Raises ``RuntimeError`` if it cannot be captured.
        """
        mark = self.mark()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        self.rewind(mark)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._forward()
        self._graph = graph
        self.rewind(mark)

    def step(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """One decode step of every sequence: tokens [B] → logits [B, V], overwritten by the next step."""
        self._tokens.copy_(torch.as_tensor(tokens, dtype=torch.int64)[:, None])
        if self._graph is None:
            self._logits = self._forward()
        else:
            self._graph.replay()
        self.steps += 1
        self.lengths = [length + 1 for length in self.lengths]
        for layer in self.layers:
            layer.advance()
        return self._logits

    def step_through(
        self, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor], tokens: Tensor | Sequence[int]
    ) -> Tensor:
        """A step, kernel by kernel, whose attention goes through ``attend(layer, queries, keys, values)``."""
        graph, self._graph = self._graph, None
        self._attend = attend
        try:
            return self.step(tokens).clone()
        finally:
            self._graph, self._attend = graph, self._attend_layer

    def extend(self, sequence: int, new: Callable[[int], tuple[Tensor, Tensor]], count: int) -> None:
        """Add ``count`` tokens that were attended densely: ``new(layer)`` gives their keys and values."""
        for number, layer in enumerate(self.layers):
            layer.extend(sequence, *new(number))
        self.lengths[sequence] += count
        self._positions[sequence] += count

    def mark(self) -> Any:
        """The state to come back to."""
        return list(self.lengths), [layer.mark() for layer in self.layers]

    def rewind(self, mark: Any) -> None:
        """Go back to a mark; the log is empty afterwards, as are page caches."""
        self.lengths = list(mark[0])
        self._positions.copy_(torch.tensor(self.lengths, dtype=torch.int64)[:, None])
        self._at.zero_()
        self.steps = 0
        for layer, state in zip(self.layers, mark[1]):
            layer.rewind(state)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """The model's attention: query [B, Hq, 1, d], key [B, H, 1, d], value → output [B, 1, Hq, dv]."""
        number = int(module.layer_idx)  # type: ignore[arg-type]
        # The kernels take rows of consecutive items; a model that projects all three at once has others.
        rows = (part[:, :, 0].contiguous() for part in (query, key, value))
        output = self._attend(number, *rows)
        return output[:, None].to(query.dtype), None

    def accesses(self, layer: int, unit: int, context: int) -> UnitAccesses:
        """What one unit of a layer asked of its cache since the last rewind."""
        fused = self.layers[layer]
        assert fused.log is not None
        return fused.log.accesses(unit, self.steps, context)

    def _attend_layer(self, number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.layers[number].attend(queries, keys, values)

    def _forward(self) -> Tensor:
        logits = decode_step(self.loaded.model, self._tokens, self._positions, self._cache)
        for layer in self.layers:
            layer.join()
        self._positions += 1
        self._at += 1
        return logits


def layer_window(plan: Plan, number: int, loaded: LoadedModel) -> int:
    """Prompt queries that the policy of a layer wants."""
    return plan.for_layer(loaded.geometry.layer(number)).prompt_window


def held_by(decoder: FusedDecoder) -> HeldBytes:
    """Bytes of all sequences of a decoder."""
    total = {"kv": 0, "cache": 0, "index": 0, "buffers": 0}
    for layer in decoder.layers:
        for name, size in layer.gpu_bytes().items():
            total[name] += size
    return HeldBytes(
        cache=total["cache"],
        index=total["index"],
        buffers=total["buffers"],
        steady=total["kv"],
        host=sum(layer.host_bytes() for layer in decoder.layers),
        full_kv=sum(full_kv_bytes(decoder.loaded.geometry, length) for length in decoder.lengths),
        counted=False,
    )


def access_log(decoder: FusedDecoder, context: int, sample: int = 0, timeline: int = 0) -> AccessLog:
    """The accesses of a decoder of one sequence, all layers that retrieve blocks."""
    log = AccessLog(decoder.loaded.geometry.layer(0).page_bytes)
    for number, layer in enumerate(decoder.layers):
        if layer.log is not None:
            for head in range(layer.info.n_kv_heads):
                log.units[sample, timeline, number, head] = decoder.accesses(number, head, context)
    return log


def cache_answers(
    decoder: FusedDecoder, log: AccessLog, capacity: int
) -> dict[Unit, tuple[list[bool], Counters]]:
    """Of each unit of ``log``, its hits in order and its counters.

    They are the page cache's where a layer has one, else a block cache's of ``capacity`` pages that only
    counts.
    """
    answers = {}
    for unit, accesses in log:
        layer, head = decoder.layers[unit[2]], unit[3]
        if isinstance(layer, FusedWaveOffload):
            assert layer.log is not None
            counted = Counters(*layer.cache.counters()[head].tolist())
            answers[unit] = (layer.log.hit_mask(head, decoder.steps), counted)
        else:
            answers[unit] = count_only(accesses, capacity)
    return answers
