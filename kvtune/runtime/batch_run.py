"""Several sequences decoded together by the fused kernels, beside full attention."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtune.devices import release
from kvtune.errors import InputError
from kvtune.models import LoadedModel, attention_through, cached
from kvtune.policies.plan import Plan
from kvtune.progress import Progress, silent
from kvtune.runtime.engine import FUSED, TORCH, Engine, EngineOptions
from kvtune.runtime.full_speed import time_full_steps
from kvtune.runtime.fused_decoder import FusedDecoder, KeysValues, held_by
from kvtune.runtime.fused_methods import plan_refusal
from kvtune.runtime.greedy_steps import TRIALS, capture_step, greedy_steps, likeliest
from kvtune.runtime.kernel_check import check_kernels
from kvtune.runtime.measurements import LiveRun, Predict
from kvtune.runtime.prompt_batch import Prefilled, PromptBatch, prefill
from kvtune.runtime.report import gpu_bytes, quantiles_ms
from kvtune.runtime.room import check_batch, free_bytes, free_host_bytes
from kvtune.workloads import Sample

COMPARED = 2
"""Sequences that are decoded alone, too."""

Advance = Callable[[], None]


@dataclass(frozen=True)
class BatchRun:
    """``size`` sequences to decode together for ``steps`` greedy tokens; see :meth:`of` and :meth:`measure`.

    prompts  tokens of the prompts there are; with fewer than ``size``, they are taken in turn
    offload  as the engine does it: ``none`` or ``cpu``
    """

    loaded: LoadedModel
    plan: Plan
    size: int
    prompts: tuple[tuple[int, ...], ...]
    steps: int
    cache_fraction: float
    offload: str

    @classmethod
    def of(
        cls,
        size: int,
        engine: Engine,
        asked: str,
        options: EngineOptions,
        samples: Sequence[Sample],
        steps: int,
    ) -> BatchRun:
        """The batch beside a run of ``samples`` on ``engine`` (``asked`` for by that name).

        A prompt is a sample's context and its first question. Raises ``InputError`` for a size below 1, an
        engine that decodes one sequence at a time, and a batch that has no room.
        """
        check_size(size)
        _require_fused(engine, asked, options)
        prompts = tuple(
            (*sample.context_ids, *sample.requests[0].turns[0].question_ids)
            for sample in samples
            if sample.requests
        )
        made = cls(
            engine.loaded, engine.plan, size, prompts[:size], steps, options.cache_fraction, engine.offload
        )
        made.check_room()
        return made

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence's prompt."""
        return [len(self.prompts[number % len(self.prompts)]) for number in range(self.size)]

    @property
    def new_tokens(self) -> int:
        return self.steps + TRIALS

    def check_room(self) -> None:
        """``InputError``, saying what would fit, where the device or the host has no room."""
        release(self.loaded.device)
        offloaded = self.offload == "cpu"
        check_batch(
            self.loaded.geometry,
            self.size,
            max(self._decoder().rows(self.lengths), max(self.lengths) + self.new_tokens),
            self.cache_fraction if offloaded else None,
            free_bytes(self.loaded.device),
            free_host_bytes() if offloaded else None,
        )

    def measure(self, run: LiveRun, predict: Predict | None, progress: Progress | None) -> None:
        """Decode the batch and put what was found into ``run.batch``, remarks into the run's notes.

        The keys of ``batch``: ``size``; ``lengths`` of the prompts; ``step_ms`` and ``full_step_ms``
        ({p50, p95}), ``tokens_per_second`` and ``full_tokens_per_second`` of all sequences together;
        ``gpu_bytes`` and ``host_bytes``, as those of a run, of the whole batch; ``same_tokens``, the share of
        the first sequences' greedy tokens that come before the first difference from those of the same
        sequence decoded alone by the same kernels (other shapes of matrix products round differently);
        ``predicted_step_ms`` by ``predict`` for the run's mean traffic; ``graph``, whether the step was one
        CUDA graph.

        Full attention is flash SDPA in a CUDA graph over as many sequences of the prompts' **mean** length,
        so that it reads as many keys as the ragged prompts have (zeros stand behind a shorter one); ``None``
        where it cannot be had. Interrupted (Ctrl-C), the run is marked so, and ``batch`` stays ``None``;
        likewise, with a note, where memory runs out.
        """
        notes: list[str] = run.engine["notes"]
        try:
            release(self.loaded.device)
            found = self._measured(notes, progress or silent)
            run.batch = {**found, "predicted_step_ms": self._predicted(run, predict)}
        except KeyboardInterrupt:
            run.interrupted = True
        except torch.OutOfMemoryError:
            notes.append(f"{self.size} sequences together ran out of memory: the batch was not measured")
        release(self.loaded.device)

    def _measured(self, notes: list[str], progress: Progress) -> dict[str, Any]:
        if len(self.prompts) < self.size:
            notes.append(f"the batch of {self.size} takes {len(self.prompts)} prompts in turn")
        with progress.task(f"{self.size} sequences together", self.size + self.steps) as task:
            prompts = self._prefilled(notes, task.advance)
            full = self._full_steps(prompts.held, notes)
            device = self.loaded.device
            decoder = self._decoder()
            with attention_through(self.loaded.model, decoder):
                decoder.start(
                    lambda layer, number: prompts.held.take(layer, number, device),
                    self.lengths,
                    lambda layer, number: prompts.queries[number][layer],
                )
                graph = capture_step(decoder, notes)
                decoded = greedy_steps(decoder, prompts.first, self.steps, task.advance)
            held = held_by(decoder)
        return {
            "size": self.size,
            "lengths": self.lengths,
            "step_ms": quantiles_ms(decoded.seconds),
            "full_step_ms": quantiles_ms(full),
            "tokens_per_second": self._rate(decoded.seconds),
            "full_tokens_per_second": self._rate(full),
            "gpu_bytes": gpu_bytes(held),
            "host_bytes": held.host,
            "same_tokens": same_share(prompts.alone, decoded.tokens.tolist()),
            "graph": graph,
        }

    def _prefilled(self, notes: list[str], advance: Advance) -> _Prompts:
        """All prompts, prefilled once each; the first sequences are decoded alone on the way."""
        loaded = self.loaded
        place = torch.device("cpu") if self.offload == "cpu" else loaded.device
        held = PromptBatch(loaded.geometry, self.lengths, loaded.model.dtype, place)
        first: list[Tensor] = []
        queries: list[Mapping[int, Tensor]] = []
        alone: list[list[int]] = []
        for number in range(self.size):
            other = number % len(self.prompts)
            if other == number:
                prompt = prefill(loaded, self.plan, self.prompts[number])
                held.put(number, prompt.cache)
                first.append(likeliest(loaded, prompt.logits[None]))
                queries.append(prompt.queries)
                if number < COMPARED:
                    alone.append(self._alone(prompt, first[number], notes))
                del prompt
            else:
                held.repeat(number, other)
                first.append(first[other])
                queries.append(queries[other])
            advance()
        return _Prompts(held, torch.cat(first), queries, alone)

    def _alone(self, prompt: Prefilled, first: Tensor, notes: list[str]) -> list[int]:
        """The greedy tokens of one sequence by a decoder of its own."""
        decoder = self._decoder()
        keys_values: KeysValues = lambda layer, _: cached(prompt.cache, layer)  # noqa: E731
        length = prompt.cache.get_seq_length()
        with attention_through(self.loaded.model, decoder):
            decoder.start(keys_values, [length], lambda layer, _: prompt.queries[layer])
            capture_step(decoder, notes)
            tokens = greedy_steps(decoder, first, self.steps).tokens[0].tolist()
        del decoder
        gc.collect()  # a decoder refers to itself
        return list(tokens)

    def _decoder(self) -> FusedDecoder:
        return FusedDecoder(
            self.loaded,
            self.plan,
            new_tokens=self.new_tokens,
            offload=self.offload,
            cache_fraction=self.cache_fraction,
        )

    def _full_steps(self, held: PromptBatch, notes: list[str]) -> list[float]:
        """Seconds of full attention's steps over all sequences, each of the mean length."""
        loaded, length = self.loaded, round(float(np.mean(self.lengths)))
        free = free_bytes(loaded.device)
        copied = self.size * length * loaded.geometry.kv_bytes_per_token if self.offload == "cpu" else 0
        if free is not None and copied > free:
            notes.append(
                f"the GPU has no room for full attention's keys and values of {self.size} sequences: its "
                "step was not timed"
            )
            return []
        found = time_full_steps(loaded, held.cut(length, loaded.device), length, self.steps)
        if not found:
            notes.append(
                "full attention's step of the batch was not timed: that takes a CUDA graph, and logits "
                "without a cap"
            )
        return found

    def _predicted(self, run: LiveRun, predict: Predict | None) -> float | None:
        """Milliseconds of a step; why there are none, the run's own prediction says."""
        if predict is None:
            return None
        try:
            return 1e3 * predict(run, self.plan, self.size).seconds
        except InputError:
            return None

    def _rate(self, seconds: Sequence[float]) -> float | None:
        return self.size * len(seconds) / sum(seconds) if seconds else None


def check_size(size: int) -> None:
    """``InputError`` for a batch of nothing."""
    if size < 1:
        raise InputError(f"--batch must be at least 1, not {size}")


def same_share(alone: Sequence[Sequence[int]], together: Sequence[Sequence[int]]) -> float:
    """The share of tokens before the first difference (what is behind it only follows)."""
    same = total = 0
    for one, other in zip(alone, together):
        differences = (at for at, (a, b) in enumerate(zip(one, other)) if a != b)
        same += next(differences, len(one))
        total += len(one)
    return same / total


@dataclass(frozen=True)
class _Prompts:
    """All prompts; each sequence's ``first`` token [B] and prompt queries, and the first ones' own tokens."""

    held: PromptBatch
    first: Tensor
    queries: list[Mapping[int, Tensor]]
    alone: list[list[int]]


def _require_fused(engine: Engine, asked: str, options: EngineOptions) -> None:
    """``InputError`` that says why the engine of a run is not the fused one."""
    if engine.name == FUSED:
        return
    needs = "--batch decodes by the fused engine, which"
    if asked == TORCH:
        raise InputError(f"{needs} --engine torch rules out", "use --engine auto, or leave out --batch")
    device = engine.loaded.device
    if device.type != "cuda":
        raise InputError(f"{needs} needs a CUDA device, not '{device}'", "leave out --batch")
    geometry = engine.loaded.geometry
    reason = plan_refusal(engine.plan, [geometry.layer(number) for number in range(geometry.n_layers)])
    reason = reason or check_kernels(engine.loaded, engine.plan, options.offload)
    raise InputError(f"{needs} does not run here: {reason}", "leave out --batch, or choose another policy")
