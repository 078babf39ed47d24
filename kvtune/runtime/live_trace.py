"""A live run as a trace: keys, values and queries as the approximated run saw them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from kvtune.capturing.hook import Sink
from kvtune.capturing.loop import CHUNK
from kvtune.capturing.plan import samples_digest
from kvtune.capturing.recording import NO_REQUEST
from kvtune.models import LoadedModel
from kvtune.policies.plan import Plan
from kvtune.runtime.decoding import Segment
from kvtune.runtime.engine import Engine
from kvtune.traces import SampleWriter, TraceWriter, check_finite
from kvtune.workloads import Request, Sample

PROMPT_QUERIES = 1024
"""Last positions of the context and of each question whose queries are kept."""


class LiveTrace:
    """Records the forced pass of a live run in the folder ``path``, for ``kvtune analyze``.

    The manifest's ``approximated`` names the policy, its parameters and the cache fraction; all else is as in
    a capture with forced answers that stay in the conversation. ``overwrite`` replaces a trace that is there.
    Nothing is written before :meth:`begin`.
    """

    def __init__(
        self,
        path: str | Path,
        loaded: LoadedModel,
        samples: Sequence[Sample],
        plan: Plan,
        *,
        cache_fraction: float,
        decode: int,
        workload: str = "given",
        seed: int = 0,
        overwrite: bool = False,
    ) -> None:
        header = _header(loaded, samples, decode, workload, seed)
        header["approximated"] = {
            "policy": plan.policy.name,
            "parameters": plan.policy.parameters(),
            "dense_layers": list(plan.dense_layers),
            "overrides": {str(layer): dict(own) for layer, own in plan.overrides.items()},
            "cache_fraction": cache_fraction,
        }
        self._path, self._header, self._overwrite = path, header, overwrite
        self._writer: TraceWriter | None = None

    def begin(self) -> None:
        """Make the folder. Raises ``InputError`` if it may not be written."""
        self._writer = TraceWriter(self._path, self._header, overwrite=self._overwrite)

    @contextmanager
    def sample(self, number: int, engine: Engine) -> Iterator[SampleTrace]:
        """Write a sample; it is there once the body ends, and not if the body raises."""
        assert self._writer is not None, "begin() comes first"
        with self._writer.sample(number) as writer:
            yield SampleTrace(engine, writer)

    def finish(self) -> None:
        """Complete the trace with the samples that are whole (none: it stays unfinished)."""
        if self._writer is not None and self._writer.completed:
            self._writer.finish()


class SampleTrace:
    """Writes one sample while ``engine`` runs it: a segment at a time, each behind its request's last."""

    def __init__(self, engine: Engine, writer: SampleWriter) -> None:
        self._engine = engine
        self._writer = writer
        self._layers = range(engine.loaded.geometry.n_layers)
        self._last: dict[int, int] = {}
        """Request → its last segment; ``NO_REQUEST``: the context's."""

    def segments(self, request: int) -> Segment:
        """What is to be entered around the segments of ``request`` (``NO_REQUEST``: the context)."""
        return partial(self._written, request)

    def note(self, request: Request, number: int, task: str, answers: Sequence[Sequence[int]]) -> None:
        """Record what the turns of a request were forced to answer (forced answers have no score)."""
        decode = getattr(self._engine.loaded.tokenizer, "decode", None)
        for t, (turn, ids) in enumerate(zip(request.turns, answers)):
            text = decode(list(ids), skip_special_tokens=True) if decode else ""
            self._writer.record(number, t, task, turn.reference, text, None)

    @contextmanager
    def _written(self, request: int, kind: str, turn: int, ids: Sequence[int]) -> Iterator[None]:
        engine, start = self._engine, self._engine.length
        parent = self._last.get(request, self._last.get(NO_REQUEST, -1))
        segment = self._writer.segment(
            kind=kind, request=request, turn=turn, parent=parent, start=start, token_ids=ids
        )
        kept = len(ids) if kind == "generated" else min(len(ids), PROMPT_QUERIES)
        with engine.showing(self._sink(segment, turn, start, kind), first=start + len(ids) - kept):
            yield
        for layer in self._layers:
            keys, values = (part.cpu() for part in engine.keys_values(layer, start))
            positions = torch.arange(start, engine.length)
            check_finite(
                keys,
                sample=self._writer.index,
                layer=layer,
                heads=list(range(len(keys))),
                positions=positions,
            )
            self._writer.keys_values(layer, segment, keys, values)
        self._last[request] = segment

    def _sink(self, segment: int, turn: int, start: int, kind: str) -> Sink:
        def sink(layer: int, position: int, queries: Tensor) -> None:
            positions = torch.arange(position, position + len(queries))
            steps = positions - start if kind == "generated" else torch.full_like(positions, -1)
            self._writer.queries(layer, segment, positions, steps, turn, queries)

        return sink


def _header(
    loaded: LoadedModel, samples: Sequence[Sample], decode: int, workload: str, seed: int
) -> dict[str, Any]:
    """The trace's provenance, as a capture writes it."""
    geometry = loaded.geometry
    return {
        "model": loaded.id,
        "fingerprint": loaded.fingerprint,
        "geometry": geometry.to_dict(),
        "rope": asdict(loaded.rope),
        "template_hash": loaded.template_hash,
        "dtype": geometry.dtype,
        "layers": list(range(geometry.n_layers)),
        "kv_heads": list(range(geometry.n_kv_heads)),
        "values": True,
        "o_proj": False,
        "seed": seed,
        "workload": {
            "name": workload,
            "context": max(len(sample.context_ids) for sample in samples),
            "samples": len(samples),
            "requests": max(len(sample.requests) for sample in samples),
            "turns": max(len(request.turns) for sample in samples for request in sample.requests),
            "digest": samples_digest(samples),
        },
        "settings": {
            "prompt_queries": PROMPT_QUERIES,
            "decode": decode,
            "force": True,
            "keep_answers": False,
            "chunk": CHUNK,
        },
        "software": {
            "device": loaded.device.type,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
