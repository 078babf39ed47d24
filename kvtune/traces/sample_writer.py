"""Writes one sample's segments, keys, values and queries into a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from kvtune.geometry import ModelGeometry
from kvtune.traces.files import VectorWriter
from kvtune.traces.schema import (
    DTYPES,
    KINDS,
    QUERY_GROUP_BYTES,
    ROW_GROUP_BYTES,
    SampleRecord,
    Segment,
    kv_schema,
    query_schema,
)

Reporting = Callable[[str], AbstractContextManager[None]]
"""Turns disk errors in its body into a ``RunError`` about what was being written."""


@dataclass
class _Pending:
    """Queries of one layer and segment that wait for their row group to fill."""

    file: VectorWriter
    segment: int = -1
    last: int = -1
    count: int = 0
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    """Positions, turns, steps (each [t]) and queries [t, Hq, d]."""


class SampleWriter:
    """What :meth:`TraceWriter.sample` hands out.

    Segments are numbered as they are made. Within each layer, keys and queries are handed over in ascending
    order of segment, each segment's keys at once, its queries in ascending order of position, in as many
    calls as is convenient. Tensors may be on any device; their dtype is the trace's.
    """

    def __init__(
        self, index: int, folder: Path, header: dict[str, Any], geometry: ModelGeometry, reporting: Reporting
    ) -> None:
        self.index = index
        self.segments: list[Segment] = []
        self.records: list[SampleRecord] = []
        self.tokens: list[list[int]] = []
        self._folder = folder
        self._reporting = partial(reporting, f"sample {index}")
        self._dtype_name: str = header["dtype"]
        self._dtype = DTYPES[self._dtype_name]
        self._layers: list[int] = header["layers"]
        self._heads: list[int] = header["kv_heads"]
        self._dims = (geometry.head_dim, geometry.value_dim if header["values"] else 0)
        group = geometry.group
        self._q_heads = np.array([h * group + g for h in self._heads for g in range(group)], np.int32)
        self._kv: dict[int, VectorWriter] = {}
        self._kv_segments: dict[int, list[int]] = {layer: [] for layer in self._layers}
        self._queries: dict[int, _Pending] = {}

    def open(self) -> None:
        """Make the sample's files, empty."""
        head_dim, value_dim = self._dims
        with self._reporting():
            for layer in self._layers:
                schema = kv_schema(self.index, layer, self._dtype_name, head_dim, value_dim or None)
                self._kv[layer] = VectorWriter(self._folder / f"kv/layer={layer}.parquet", schema)
                schema = query_schema(self.index, layer, self._dtype_name, head_dim)
                file = VectorWriter(self._folder / f"queries/layer={layer}.parquet", schema)
                self._queries[layer] = _Pending(file)

    def segment(
        self,
        *,
        kind: str,
        request: int,
        turn: int,
        parent: int,
        start: int,
        token_ids: Sequence[int] | Tensor,
    ) -> int:
        """Add a segment of ``token_ids`` whose first token has position ``start``; returns its id.

        Raises ``ValueError`` if it does not continue its ``parent`` (-1: none, start 0).
        """
        if kind not in KINDS:
            raise ValueError(f"segment kind must be one of {', '.join(KINDS)}, not '{kind}'")
        if not -1 <= parent < len(self.segments):
            raise ValueError(f"segment {len(self.segments)} can't hang off segment {parent}")
        expected = self.segments[parent].stop if parent >= 0 else 0
        if start != expected:
            raise ValueError(f"segment {len(self.segments)} must start at {expected}, not {start}")
        ids = token_ids.tolist() if isinstance(token_ids, Tensor) else [int(token) for token in token_ids]
        self.segments.append(
            Segment(self.index, len(self.segments), request, turn, kind, parent, start, len(ids))
        )
        self.tokens.append(ids)
        return len(self.segments) - 1

    def keys_values(self, layer: int, segment: int, keys: Tensor, values: Tensor | None) -> None:
        """Keys [H, n, d] and values [H, n, dv] (``None`` in a trace without values) of a whole segment."""
        owner = self.segments[segment]
        done = self._kv_segments[layer]
        if done and segment <= done[-1]:
            raise ValueError(
                f"keys of layer {layer} must come by ascending segment: {segment} after {done[-1]}"
            )
        head_dim, value_dim = self._dims
        self._check("keys", keys, (len(self._heads), owner.length, head_dim))
        if value_dim:
            if values is None:
                raise ValueError("this trace keeps values: none given")
            self._check("values", values, (len(self._heads), owner.length, value_dim))
        elif values is not None:
            raise ValueError("this trace keeps no values")
        done.append(segment)
        per_group = max(1, ROW_GROUP_BYTES // (sum(self._dims) * self._dtype.itemsize))
        with self._reporting():
            for row, head in enumerate(self._heads):
                for a in range(0, owner.length, per_group):
                    b = min(a + per_group, owner.length)
                    columns: dict[str, Any] = {
                        "segment": np.full(b - a, segment, np.int32),
                        "position": np.arange(owner.start + a, owner.start + b, dtype=np.int32),
                        "kv_head": np.full(b - a, head, np.int32),
                        "key": keys[row, a:b],
                    }
                    if values is not None:
                        columns["value"] = values[row, a:b]
                    self._kv[layer].write(columns)

    def queries(
        self,
        layer: int,
        segment: int,
        positions: Sequence[int] | Tensor,
        steps: Sequence[int] | Tensor,
        turn: int,
        queries: Tensor,
    ) -> None:
        """Queries [t, Hq, d] at ``positions`` [t]; ``steps`` [t] are a turn's decode steps (-1: prompt).

        Hq is the query heads of the kept kv heads, in order.
        """
        at, step = _int32(positions), _int32(steps)
        self._check("queries", queries, (len(at), len(self._q_heads), self._dims[0]))
        if len(step) != len(at):
            raise ValueError(f"{len(step)} steps for {len(at)} positions")
        pending = self._queries[layer]
        if segment < pending.segment:
            raise ValueError(
                f"queries of layer {layer} must come by ascending segment: {segment} after {pending.segment}"
            )
        owner = self.segments[segment]
        with self._reporting():
            if segment != pending.segment:
                self._flush(pending)
                pending.segment, pending.last = segment, owner.start - 1
            if len(at) and (at[0] <= pending.last or at[-1] >= owner.stop or bool((at[1:] <= at[:-1]).any())):
                raise ValueError(f"query positions of segment {segment} must ascend within it")
            self._buffer(pending, turn, at, step, queries)

    def record(
        self, request: int, turn: int, task: str, reference: str | None, generated: str, score: float | None
    ) -> None:
        """Note what one turn was asked to answer and what it answered."""
        reference = None if reference is None else _encodable(reference)
        generated = _encodable(generated)
        self.records.append(SampleRecord(self.index, task, request, turn, reference, generated, score))

    def close(self) -> dict[str, int]:
        """Complete the files; returns the rows of each. Raises ``ValueError`` if a segment lacks its keys."""
        wanted = [segment.segment for segment in self.segments if segment.length]
        for layer, done in self._kv_segments.items():
            missing = sorted(set(wanted) - set(done))
            if missing:
                raise ValueError(f"sample {self.index}: layer {layer} lacks the keys of segments {missing}")
        rows = {}
        for layer in self._layers:
            self._flush(self._queries[layer])
            for part, file in (("kv", self._kv[layer]), ("queries", self._queries[layer].file)):
                file.close()
                rows[f"{part}/layer={layer}.parquet"] = file.rows
        return rows

    def abandon(self) -> None:
        """Release the files, whatever state they are in (does nothing after :meth:`close`)."""
        for file in [*self._kv.values(), *(pending.file for pending in self._queries.values())]:
            try:
                file.close()
            except (OSError, pa.ArrowException):
                continue

    def _check(self, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != self._dtype:
            raise ValueError(
                f"{what} must be {list(shape)} {self._dtype}, not {list(tensor.shape)} {tensor.dtype}"
            )

    def _buffer(self, pending: _Pending, turn: int, at: Tensor, step: Tensor, queries: Tensor) -> None:
        """Queue queries and write each row group that fills: groups do not depend on how calls were cut."""
        per_group = max(1, QUERY_GROUP_BYTES // (queries.shape[1] * queries.shape[2] * self._dtype.itemsize))
        a = 0
        while a < len(at):
            b = min(len(at), a + per_group - pending.count)
            part = queries[a:b].detach().to("cpu", copy=True)
            pending.parts.append((at[a:b], torch.full_like(at[a:b], turn), step[a:b], part))
            pending.count += b - a
            pending.last = int(at[b - 1])
            if pending.count == per_group:
                self._flush(pending)
            a = b

    def _flush(self, pending: _Pending) -> None:
        if not pending.parts:
            return
        heads = len(self._q_heads)
        at, turns, steps, queries = (torch.cat(column) for column in zip(*pending.parts))
        pending.file.write(
            {
                "segment": np.full(len(at) * heads, pending.segment, np.int32),
                "turn": turns.numpy().repeat(heads),
                "step": steps.numpy().repeat(heads),
                "position": at.numpy().repeat(heads),
                "q_head": np.tile(self._q_heads, len(at)),
                "query": queries.flatten(0, 1),
            }
        )
        pending.parts, pending.count = [], 0


def _int32(numbers: Sequence[int] | Tensor) -> Tensor:
    return torch.as_tensor(numbers).detach().to("cpu", torch.int32, copy=True).reshape(-1)


def _encodable(text: str) -> str:
    """``text`` with lone surrogates, which JSON input can hold and UTF-8 cannot, as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
