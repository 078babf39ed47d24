"""Where a decode step's time goes: its kernels by stage, as the profiler of the GPU sees them.

The stages are named as the cost model's terms (``hardware.cost.TERMS``), so that one measured stands beside
the one predicted. Kernels on two streams overlap: stages may add up to more than the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from kvtune.runtime.fused_decoder import FusedDecoder

MODEL = "model"
"""Everything that is no kernel of ours: projections, MLP, norms, embeddings, the logits, copies."""

STAGES = {
    "_append_kernel": "append",
    "_page_kernel": "append",
    "_cut_tail_kernel": "append",
    "_scan_kernel": "scan",
    "_cosine_kernel": "scan",
    "_probe_kernel": "scan",
    "_list_kernel": "scan",
    "_row_kernel": "scan",
    "_rank_kernel": "choose",
    "_part_kernel": "choose",
    "_compare_kernel": "choose",
    "_cut_kernel": "id_copy",
    "_estimate_kernel": "estimate",
    "_lookup_kernel": "lookup",
    "_fetch_kernel": "fetch",
    "_update_kernel": "update",
    "_exact_kernel": "attend",
    "_merge_kernel": "attend",
}
"""Kernel of ``kvtune.kernels`` → stage. What a method reads to find its candidates is its scan: centroids,
page bounds, CTkvr's lists and the candidates' keys."""

COUNTED = 3
STEPS = COUNTED + 1
"""Steps that are profiled, the first of which (the profiler's own start) is not counted."""


def stage_of(kernel: str) -> str:
    """The stage of a kernel by its name on the device."""
    return STAGES.get(kernel, MODEL)


def stage_seconds(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds by stage of (kernel, microseconds) pairs; stages that do not occur are left out."""
    found: dict[str, float] = defaultdict(float)
    for name, microseconds in kernels:
        found[stage_of(name)] += microseconds * 1e-6
    return dict(found)


def decode_stages(
    decoder: FusedDecoder,
    logits: Tensor,
    profiled: Callable[[Callable[[], Tensor]], dict[str, float]] | None = None,
) -> tuple[dict[str, float], str]:
    """Seconds by stage of ``COUNTED`` greedy decode steps together, behind ``logits`` [V] of one sequence.

    The steps are the decoder's own, its CUDA graph where there is one; should the profiler see nothing of
    that, they run kernel by kernel. Where it sees nothing at all, or there is none, the answer is empty and
    its second part says why. Up to ``STEPS`` steps are made, for which the decoder needs room; the caller
    marks it before and rewinds it.
    """
    if max(decoder.lengths) + STEPS > decoder.loaded.geometry.max_positions:
        return {}, "the model takes no further positions"
    profiled = profiled or profile_step
    total: dict[str, float] = defaultdict(float)
    tokens, eagerly = logits.argmax().view(1), False

    def step() -> Tensor:
        nonlocal tokens
        if eagerly:
            tokens = decoder.step_through(lambda number, *of: decoder.layers[number].attend(*of), tokens)
        else:
            tokens = decoder.step(tokens)
        return tokens

    for number in range(STEPS):
        try:
            found = profiled(step)
        except RuntimeError as error:
            return {}, str(error)
        tokens = tokens.argmax(1)
        if number:
            for name, seconds in found.items():
                total[name] += seconds
        else:
            eagerly = not found
    return dict(total), "" if total else "the profiler saw no kernels"


def profile_step(step: Callable[[], Tensor]) -> dict[str, float]:
    """Seconds by stage of what ``step`` launches on the GPU; empty where no kernel was recorded.

    Raises ``RuntimeError`` where there is no profiler.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    return stage_seconds(kernels_of(profiler.events() or []))


def kernels_of(events: Iterable[Any]) -> list[tuple[str, float]]:
    """(name, microseconds) of the events that took place on the GPU."""
    return [
        (event.name, event.time_range.elapsed_us())
        for event in events
        if event.device_type == DeviceType.CUDA
    ]
