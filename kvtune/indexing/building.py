"""Indexes of the prompt's keys of chosen layers, samples and timelines of a trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtune.caching.access_log import Unit
from kvtune.clustering.key_index import IndexSpec
from kvtune.devices import choose_device
from kvtune.errors import InputError
from kvtune.indexing.store import KeyIndex, check_target, index_class, new_index
from kvtune.progress import Progress, silent
from kvtune.traces import Timeline, Trace


@dataclass(frozen=True)
class Chosen:
    """What is indexed: pairs of timeline and layer number, every kv head of each."""

    trace: Trace
    pairs: list[tuple[Timeline, int]]

    def __iter__(self) -> Iterator[tuple[Timeline, int]]:
        return iter(self.pairs)

    def units(self, timeline: Timeline, layer: int) -> list[Unit]:
        """(sample, timeline, layer, kv_head) of one pair, in the order of the keys' heads."""
        return [(timeline.sample, timeline.index, layer, head) for head in self.trace.kv_heads]


def choose(
    trace: Trace,
    layers: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
    timelines: Sequence[int] | None = None,
) -> Chosen:
    """Timelines and layers by number (``None``: all; of the layers, those without a sliding window).

    Raises ``InputError`` for a number that the trace does not hold, or a layer with a window: its queries do
    not see the whole prompt, so an index of it has no truth to be compared with.
    """
    open_layers = [layer for layer in trace.layers if trace.layer_info(layer).window is None]
    for layer in layers or ():
        if layer not in trace.layers:
            raise InputError(f"the trace holds no layer {layer}", f"it holds: {_listed(trace.layers)}")
        if layer not in open_layers:
            raise InputError(f"layer {layer} has a sliding window; its queries do not see the whole prompt")
    if not open_layers:
        raise InputError("every layer of this trace has a sliding window: there is nothing to index")
    for sample in samples or ():
        if not 0 <= sample < trace.n_samples:
            raise InputError(f"the trace holds no sample {sample}", f"it holds {trace.n_samples}, from 0")
    wanted = [
        timeline
        for sample in (range(trace.n_samples) if samples is None else samples)
        for timeline in trace.timelines(sample)
        if timelines is None or timeline.index in timelines
    ]
    if not wanted:
        raise InputError(f"the trace holds no timeline {_listed(timelines or ())} of those samples")
    return Chosen(trace, [(timeline, layer) for timeline in wanted for layer in layers or open_layers])


def prompt_keys(timeline: Timeline, layer: int) -> Tensor:
    """The keys that an index holds, [H, prompt_length, d]: every decode query sees them all."""
    return timeline.layer(layer).keys[:, : timeline.prompt_length]


def build_one(keys: Tensor, spec: IndexSpec, place: torch.device, seed: int) -> KeyIndex:
    """The index of one kv head's keys [N, d]."""
    return index_class(spec.kind).build(keys, spec, place, seed)


def build_index(
    trace: Trace,
    folder: str | Path,
    spec: IndexSpec,
    *,
    layers: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
    timelines: Sequence[int] | None = None,
    device: str = "auto",
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Index the prompt's keys and write them to ``folder``, one file per sample, timeline, layer and kv head.

    Returns a summary: ``index`` (the folder), ``kind``, ``metric``, ``parameters``, ``indexes``, ``keys``,
    ``bytes``, ``structure_bytes``, ``build_seconds``, ``notes``. Raises ``InputError`` for a folder that
    exists (unless ``overwrite`` and it is an index), choices that the trace lacks, or keys that do not fit
    ``spec``; nothing is left behind then.
    """
    folder = Path(folder)
    check_target(folder, overwrite)
    chosen, place = choose(trace, layers, samples, timelines), choose_device(device)
    seconds = 0.0
    with (
        new_index(folder, overwrite) as writer,
        (progress or silent).task("indexing", len(chosen.pairs)) as task,
    ):
        for timeline, layer in chosen:
            for unit, keys in zip(chosen.units(timeline, layer), prompt_keys(timeline, layer)):
                started = time.perf_counter()
                index = build_one(keys, spec, place, seed)
                seconds += time.perf_counter() - started
                writer.add(unit, index)
            task.advance()
        writer.finish(
            {
                "trace": trace_identity(trace),
                "kind": spec.kind,
                "metric": spec.metric,
                "parameters": dict(spec.parameters),
                "seed": seed,
            }
        )
    files = writer.files
    return {
        "index": str(folder),
        "kind": spec.kind,
        "metric": spec.metric,
        "parameters": dict(spec.parameters),
        "indexes": len(files),
        **{key: sum(entry[key] for entry in files) for key in ("keys", "bytes", "structure_bytes")},
        "build_seconds": seconds,
        "notes": sorted({note for entry in files for note in entry["notes"]}),
    }


def trace_identity(trace: Trace) -> dict[str, Any]:
    """What says that an index was made of this trace."""
    return {
        "model": trace.model,
        "fingerprint": trace.fingerprint,
        "digest": trace.manifest["digest"],
    }


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
