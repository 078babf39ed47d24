"""The fast engine: prefill as the model does it, decode by fused layers in one CUDA graph."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvtune.attention import group_queries
from kvtune.caching import AccessLog, Unit, capacity_pages
from kvtune.capturing import loop
from kvtune.capturing.hook import Listener, Sink
from kvtune.capturing.loop import Session
from kvtune.errors import InputError
from kvtune.models import LoadedModel, cached, sdpa
from kvtune.policies.plan import Plan
from kvtune.runtime import stage_times
from kvtune.runtime.attached import Attached
from kvtune.runtime.block_cache import Counters
from kvtune.runtime.build_beside import BuildBeside
from kvtune.runtime.engine import EngineOptions, HeldBytes, Timings, full_kv_bytes
from kvtune.runtime.full_speed import time_full_steps
from kvtune.runtime.fused_decoder import FusedDecoder, access_log, cache_answers, held_by, layer_window
from kvtune.runtime.fused_methods import offloads, plan_refusal
from kvtune.runtime.room import check_layers, free_bytes, free_host_bytes


@dataclass(frozen=True)
class _Mark:
    """The session's place, the tokens the plan has seen, and the decoder's state (``None``: not built)."""

    place: loop.Mark
    passed: int
    logits: Tensor
    decoder: Any


class FusedEngine(Attached):
    """See :class:`kvtune.runtime.engine.Engine`. Serves the methods of ``fused_methods``, on CUDA devices.

    The model's own cache holds prompts and questions: full attention, the reference, goes on from it. The
    plan's layers have keys and values of their own, made by ``build``; ``--offload cpu`` moves those of the
    clusters to host memory behind a page cache. With ``offload none`` the block caches only count.

    Of a feed that the index follows, the last chunk's layers build their index on a second stream while the
    model goes on (:class:`~kvtune.runtime.build_beside.BuildBeside`).

    ``timings.full_steps`` are those of full attention by flash SDPA in a CUDA graph at the prompt's length.
    """

    name = "fused"

    def __init__(self, loaded: LoadedModel, plan: Plan, options: EngineOptions) -> None:
        geometry = loaded.geometry
        layers = [geometry.layer(number) for number in range(geometry.n_layers)]
        reason = plan_refusal(plan, layers)
        if reason is not None:
            raise InputError(f"the fused engine: {reason}", "use --engine torch")
        self.loaded, self.plan = loaded, plan
        self.timings = Timings()
        self.notes: list[str] = []
        self.offload = options.offload
        if self.offload != "none" and not offloads(plan, layers):
            self.offload = "none"
            self.notes.append(
                f"the fused engine moves no keys and values of {plan.policy.name}: --offload "
                f"{options.offload} has no effect"
            )
        self._options = options
        self._full = False
        self._stepping: FusedDecoder | None = None
        self._beside: BuildBeside | None = None
        self._eager: list[float] = []
        self._listener = Listener()
        self.start()

    @property
    def length(self) -> int:
        return self._passed

    @property
    def logits(self) -> Tensor:
        return self._logits

    @property
    def built(self) -> bool:
        return self._decoder is not None

    def start(self) -> None:
        self._session = Session(self.loaded, room=self._options.longest)
        self._decoder: FusedDecoder | None = None
        self._passed = 0
        self._context = 0
        self._logits = self._session.logits
        self._queries: dict[int, Tensor] = {}

    def feed(self, ids: Sequence[int], then_build: bool = False) -> None:
        if then_build:
            self._feed_and_build(ids)
            return
        if self._full:
            self._session.feed(ids)
            self._logits, self._passed = self._session.logits, self._session.length
            return
        started = self._now()
        if self._decoder is not None:
            self._catch_up(self._decoder)
        before = self._session.length
        self._session.feed(ids)
        self._logits, self._passed = self._session.logits, self._session.length
        if self._decoder is not None:
            self._decoder.extend(0, lambda number: self._held(number, before), len(ids))
        self.timings.prefill.append(self._now() - started)

    def build(self) -> None:
        started = self._now()
        beside = self._prepare(self._session.length)
        beside.join()
        self._decoder = beside.decoder
        self.timings.index_build.append(self._now() - started)
        self._capture(self._decoder)

    def _feed_and_build(self, ids: Sequence[int]) -> None:
        """Prefill; each layer's index is built beside the last chunk, once the layer's keys are there."""
        started = self._now()
        self._beside = beside = self._prepare(self._session.length + len(ids))
        try:
            self._session.feed(ids)
            if self.loaded.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the model's own work; builds may be left
            fed = time.perf_counter()
            beside.join()
        finally:
            self._beside = None
            beside.drop()
        self._decoder = beside.decoder
        self._logits, self._passed = self._session.logits, self._session.length
        self.timings.prefill.append(fed - started - beside.seconds)
        self.timings.index_build.append(self._now() - fed + beside.seconds)
        self._capture(self._decoder)

    def _prepare(self, context: int) -> BuildBeside:
        """A decoder whose layers are to be built over ``context`` tokens; refused where it has no room."""
        if self._decoder is not None:
            raise ValueError("the index is built already")
        if self._full:
            raise ValueError("there is nothing to build within full attention")
        self._context = context
        new_tokens = max(self._options.longest - context, 1) + stage_times.STEPS
        self._check_room(new_tokens)
        decoder = FusedDecoder(
            self.loaded,
            self.plan,
            new_tokens=new_tokens,
            offload=self.offload,
            cache_fraction=self._options.cache_fraction,
            log_steps=new_tokens,
        )
        decoder.prepare([context])
        return BuildBeside(decoder, lambda number, _: self._held(number), lambda n, _: self._queries[n])

    def _capture(self, decoder: FusedDecoder) -> None:
        """Record the step as a CUDA graph, on a GPU; a note where that fails."""
        if self.loaded.device.type == "cuda":
            try:
                with self._stepping_by(decoder):
                    decoder.capture()
            except RuntimeError as error:
                self.notes.append(
                    f"the step could not be captured as a CUDA graph ({error}); it runs eagerly"
                )

    def step(self, token: int) -> Tensor:
        if self._full:
            started = self._now()
            self.feed([token])
            self._eager.append(self._now() - started)
            return self._logits.float()
        if self._decoder is None:
            self.build()
        decoder = self._decoder
        assert decoder is not None
        started = self._now()
        with self._stepping_by(decoder):
            if self._listener.present:
                logits = decoder.step_through(self._showing_layer, [token])
            else:
                logits = decoder.step([token])
        self._logits = logits[0].clone()
        self.timings.steps.append(self._now() - started)
        self._passed += 1
        return self._logits.float()

    @contextmanager
    def full_attention(self) -> Iterator[None]:
        self._full = True
        before = self._session.length
        try:
            yield
        finally:
            self._full = False
            eager, self._eager = self._eager, []
            graphed = time_full_steps(self.loaded, self._session.cache, before, len(eager))
            self.timings.full_steps += graphed or eager

    def showing(self, sink: Sink, first: int = 0) -> AbstractContextManager[None]:
        return self._listener.to(sink, first)

    def keys_values(self, layer: int, start: int = 0) -> tuple[Tensor, Tensor]:
        keys, values = self._held(layer, min(start, self._session.length))
        made_from = max(start, self._session.length)
        if self._decoder is None or made_from >= self._passed or self._full:
            return keys, values
        more_keys, more_values = self._decoder.layers[layer].made(0, made_from)
        return torch.cat([keys, more_keys], 1), torch.cat([values, more_values], 1)

    def index(self, layer: int) -> Any:
        """The policy's own index, built anew from the prompt and what followed it."""
        info = self.loaded.geometry.layer(layer)
        policy = self.plan.for_layer(info)
        keys, values = self.keys_values(layer)
        context = self._context
        index = policy.build(keys[:, :context], values[:, :context], self._prompt_queries(layer), info)
        positions = torch.arange(context, keys.shape[1], device=keys.device)
        if len(positions):
            policy.append(index, keys[:, context:], values[:, context:], positions)
        return index

    def mark(self) -> _Mark:
        decoder = None if self._decoder is None else self._decoder.mark()
        return _Mark(self._session.mark(), self._passed, self._logits, decoder)

    def rewind(self, mark: _Mark) -> None:
        self._session.rewind(mark.place)
        self._passed, self._logits = mark.passed, mark.logits
        if mark.decoder is None:
            self._decoder = None
        elif self._decoder is not None:
            self._decoder.rewind(mark.decoder)

    def measure_stages(self) -> None:
        """See :mod:`kvtune.runtime.stage_times`; on a GPU only, a note where it cannot be done."""
        if self._decoder is None or self.loaded.device.type != "cuda":
            return
        mark = self._decoder.mark()
        with self._stepping_by(self._decoder):
            found, refused = stage_times.decode_stages(self._decoder, self._logits)
        self._decoder.rewind(mark)
        self.timings.stages, self.timings.stage_steps = found, stage_times.COUNTED
        if not found:
            self.notes.append(f"the step was not timed by stage: {refused}")

    def access_log(self, sample: int = 0, timeline: int = 0) -> AccessLog:
        if self._decoder is None:
            return AccessLog(self.loaded.geometry.layer(0).page_bytes)
        return access_log(self._decoder, self._context, sample, timeline)

    def hit_masks(self, sample: int = 0, timeline: int = 0) -> dict[Unit, list[bool]]:
        return {unit: hits for unit, (hits, _) in self._cached(sample, timeline).items()}

    def counters(self) -> dict[str, tuple[int, int]]:
        total = {"request": [0, 0], "page": [0, 0], "token": [0, 0]}
        for _, counted in self._cached().values():
            for name, pair in (
                ("request", counted.requests),
                ("page", counted.pages),
                ("token", counted.tokens),
            ):
                total[name] = [a + b for a, b in zip(total[name], pair)]
        return {name: (hits, asked) for name, (hits, asked) in total.items()}

    def held_bytes(self) -> HeldBytes:
        if self._decoder is not None:
            return held_by(self._decoder)
        full_kv = full_kv_bytes(self.loaded.geometry, self.length)
        return HeldBytes(cache=0, index=0, buffers=0, steady=0, host=0, full_kv=full_kv, counted=False)

    def attention(  # type: ignore[override]
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """The model's attention: the decoder's during its steps, else the model's own over its cache."""
        if self._stepping is not None:
            return self._stepping(module, query, key, value, attention_mask, **kwargs)
        if query.shape[0] != 1:
            raise InputError("a live run decodes one sequence at a time", "use a batch of 1")
        number = int(module.layer_idx)  # type: ignore[arg-type]
        self._see(number, query[0].transpose(0, 1), key.shape[2])
        beside = self._beside
        if beside is None or key.shape[2] < beside.length:
            return sdpa(module, query, key, value, attention_mask, **kwargs)
        with beside.layer(number):
            return sdpa(module, query, key, value, attention_mask, **kwargs)

    def _see(self, number: int, queries: Tensor, length: int) -> None:
        """Show queries [T, Hq, d] to whoever asked, and keep the prompt's last ones for the policy."""
        self._listener.show(number, queries, length)
        window = layer_window(self.plan, number, self.loaded)
        if window and self._decoder is None and not self._full:
            heads = self.loaded.geometry.n_kv_heads
            fresh = group_queries(queries[-window:], heads).permute(1, 2, 0, 3)
            seen = self._queries.get(number) if length > len(queries) else None
            both = fresh if seen is None else torch.cat([seen, fresh], 2)
            self._queries[number] = both[:, :, -window:].clone()

    def _showing_layer(self, number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self._decoder is not None
        self._listener.show(number, queries, self._passed + 1)
        return self._decoder.layers[number].attend(queries, keys, values)

    def _prompt_queries(self, number: int) -> Tensor:
        geometry, keys = self.loaded.geometry, self._held(number)[0]
        none = keys.new_zeros(geometry.n_kv_heads, geometry.group, 0, geometry.head_dim)
        return self._queries.get(number, none)

    @contextmanager
    def _stepping_by(self, decoder: FusedDecoder) -> Iterator[None]:
        """Inside, the model's attention is the decoder's."""
        self._stepping = decoder
        try:
            yield
        finally:
            self._stepping = None

    def _held(self, number: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values from position ``start`` on that the model's own cache holds."""
        keys, values = cached(self._session.cache, number)
        return keys[:, start:], values[:, start:]

    def _catch_up(self, decoder: FusedDecoder) -> None:
        """Give the model's own cache the tokens that were decoded under the plan."""
        before = self._session.length
        if self._passed == before:
            return
        for number, layer in enumerate(decoder.layers):
            keys, values = layer.made(0, before)
            with torch.inference_mode():
                self._session.cache.update(keys[None], values[None], number)
        self._session.length = self._passed

    def _cached(self, sample: int = 0, timeline: int = 0) -> dict[Unit, tuple[list[bool], Counters]]:
        """Hits in the order of the log and what the cache counted, of each unit."""
        if self._decoder is None:
            return {}
        capacity = capacity_pages(self._options.cache_fraction, self._context)
        return cache_answers(self._decoder, self.access_log(sample, timeline), capacity)

    def _check_room(self, new_tokens: int) -> None:
        """Refuse what the GPU or the host has no room for before anything is taken."""
        geometry = self.loaded.geometry
        gc.collect()  # a decoder refers to itself: the last one may still be there
        free = free_bytes(self.loaded.device)
        if free is not None and not self._session.length:  # the model's own cache is still to come
            free -= self._options.longest * geometry.kv_bytes_per_token
        host = free_host_bytes() if self.offload == "cpu" else None
        row_bytes = geometry.kv_bytes_per_token // geometry.n_layers
        check_layers(geometry.n_layers, self._context + new_tokens, row_bytes, free, host)
