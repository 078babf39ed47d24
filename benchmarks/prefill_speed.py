"""Prefill in one pass, alone and with the index built beside it: prompts, and the seconds of both."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from kvtune.models import LoadedModel, attention_through, cached, feed, new_cache, sdpa
from kvtune.policies.plan import Plan
from kvtune.runtime.build_beside import BuildBeside
from kvtune.runtime.fused_decoder import FusedDecoder
from kvtune.workloads import get_workload

PASSES = 2
"""Prefills timed, of which the best counts."""


def prompt(loaded: LoadedModel, kind: str, context: int) -> torch.Tensor:
    """``context`` tokens [N]: random ones, or the last of a code search's context and question."""
    if kind == "random":
        generator = torch.Generator().manual_seed(context)
        return torch.randint(3, 30000, (context,), generator=generator).to(loaded.device)
    sample = next(iter(get_workload("code_search").samples(loaded.tokenizer, context, 1, 1, 1, 0)))
    ids = [*sample.context_ids, *sample.requests[0].turns[0].question_ids]
    return torch.tensor(ids[-context:], device=loaded.device)


def prefilled(loaded: LoadedModel, ids: torch.Tensor) -> tuple[Any, float]:
    """A cache of ``ids``, filled in one pass, and the seconds of the best pass."""
    times = []
    for _ in range(PASSES):
        cache = new_cache()
        times.append(seconds(lambda cache=cache: feed(loaded.model, ids, cache)))
    return cache, min(times)


def prefilled_and_built(loaded: LoadedModel, ids: torch.Tensor, plan: Plan) -> tuple[float, float]:
    """Seconds of the best prefill with the index of ``plan`` built beside it, and of those behind its end."""
    times = []
    for _ in range(PASSES):
        cache, ends = new_cache(), []
        decoder = FusedDecoder(loaded, plan, new_tokens=64)

        def body(cache: Any = cache, decoder: FusedDecoder = decoder, ends: list[float] = ends) -> None:
            decoder.prepare([len(ids)])
            beside = BuildBeside(decoder, lambda layer, _: cached(cache, layer))

            def attend(module: Any, *given: Any, **options: Any) -> tuple[torch.Tensor, Any]:
                with beside.layer(int(module.layer_idx)):
                    return sdpa(module, *given, **options)

            with attention_through(loaded.model, attend):
                feed(loaded.model, ids, cache)
            torch.cuda.current_stream().synchronize()
            ends.append(time.perf_counter())
            beside.join()
            ends.append(now())

        times.append((seconds(body), ends[1] - ends[0]))
        del cache, decoder, body
        gc.collect()
    return min(times)


def seconds(body: Any) -> float:
    started = now()
    body()
    return now() - started


def now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
