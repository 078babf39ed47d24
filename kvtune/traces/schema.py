"""The trace format: folder layout, Parquet schemas, and the rows that users see.

A trace is a folder: ``manifest.json``, the tables ``samples``, ``segments`` and ``tokens`` (Parquet), and
vectors in ``kv/sample=S/layer=L.parquet``, ``queries/sample=S/layer=L.parquet`` and, optionally,
``o_proj/layer=L.parquet``. Vectors are ``FixedSizeBinary``, bit for bit what the dot product sees, with
dtype and dimension in the field's metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

FORMAT = "kvtune-trace"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SAMPLES, SEGMENTS, TOKENS = "samples.parquet", "segments.parquet", "tokens.parquet"
ROW_GROUP_BYTES = 64 << 20
"""A segment × kv_head above this many bytes of vectors is split over several row groups."""
QUERY_GROUP_BYTES = 1 << 20
"""Queries wait in memory, of all layers at once, until they fill a row group of this size."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KINDS = ("context", "question", "generated", "fed_back")
ANSWERS = ("generated", "fed_back")

MANIFEST_FIELDS = ("format", "format_version", "kvtune_version", "n_samples", "files", "complete", "digest")
"""Top-level manifest keys that the writer fills; all others are the capture's header."""
HEADER_FIELDS = ("model", "fingerprint", "geometry", "dtype", "layers", "kv_heads", "values")
"""Header keys that the reader needs."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a sample's token tree.

    ``parent`` is the segment it continues (-1: none), ``start`` the position of its first token. A segment
    shared by all requests (the context) may carry any ``request`` and ``turn``; captures write -1.
    """

    sample: int
    segment: int
    request: int
    turn: int
    kind: str
    parent: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + self.length


@dataclass(frozen=True)
class SampleRecord:
    """What was asked and answered in one turn. ``score`` is the task's, ``None`` without a reference."""

    sample: int
    task: str
    request: int
    turn: int
    reference: str | None
    generated: str
    score: float | None


def _column(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable)


TABLES = {
    SAMPLES: pa.schema(
        [
            _column("sample", pa.int32()),
            _column("task", pa.string()),
            _column("request", pa.int32()),
            _column("turn", pa.int32()),
            _column("reference", pa.string(), nullable=True),
            _column("generated", pa.string()),
            _column("score", pa.float64(), nullable=True),
        ]
    ),
    SEGMENTS: pa.schema(
        [
            _column("sample", pa.int32()),
            _column("segment", pa.int32()),
            _column("request", pa.int32()),
            _column("turn", pa.int32()),
            _column("kind", pa.string()),
            _column("parent", pa.int32()),
            _column("start", pa.int64()),
            _column("length", pa.int64()),
        ]
    ),
    TOKENS: pa.schema([_column(name, pa.int32()) for name in ("sample", "segment", "position", "token")]),
}
"""The tables over all samples: rows in order of sample, one row group per sample."""


def kv_schema(sample: int, layer: int, dtype: str, head_dim: int, value_dim: int | None) -> pa.Schema:
    """Rows of one layer's keys and values (``value_dim`` None: keys only)."""
    fields = [*_ids("segment", "position", "kv_head"), _vectors("key", dtype, head_dim)]
    if value_dim is not None:
        fields.append(_vectors("value", dtype, value_dim))
    return pa.schema(fields, metadata=_whose("kv", sample, layer))


def query_schema(sample: int, layer: int, dtype: str, head_dim: int) -> pa.Schema:
    """Rows of one layer's queries."""
    fields = [*_ids("segment", "turn", "step", "position", "q_head"), _vectors("query", dtype, head_dim)]
    return pa.schema(fields, metadata=_whose("queries", sample, layer))


def projection_schema(layer: int, dtype: str, dim: int) -> pa.Schema:
    """Rows of one layer's output projection: a row per output feature, ``dim`` = heads × dv."""
    return pa.schema([_vectors("weight", dtype, dim)], metadata=_whose("o_proj", -1, layer))


def kv_name(sample: int, layer: int) -> str:
    return f"kv/sample={sample}/layer={layer}.parquet"


def query_name(sample: int, layer: int) -> str:
    return f"queries/sample={sample}/layer={layer}.parquet"


def projection_name(layer: int) -> str:
    return f"o_proj/layer={layer}.parquet"


def token_table(sample: int, segments: list[dict[str, Any]], tokens: list[list[int]]) -> pa.Table:
    """The rows of ``TOKENS`` of one sample: its segments (as dicts) and the token ids of each."""
    rows = [
        (sample, segment["segment"], segment["start"] + offset, token)
        for segment, ids in zip(segments, tokens)
        for offset, token in enumerate(ids)
    ]
    columns = zip(*rows) if rows else ((),) * 4
    return pa.table([pa.array(column, pa.int32()) for column in columns], schema=TABLES[TOKENS])


def _ids(*names: str) -> list[pa.Field]:
    return [_column(name, pa.int32()) for name in names]


def _vectors(name: str, dtype: str, dim: int) -> pa.Field:
    width = dim * DTYPES[dtype].itemsize
    return pa.field(name, pa.binary(width), nullable=False, metadata={"dtype": dtype, "dimension": str(dim)})


def _whose(part: str, sample: int, layer: int) -> dict[str, str]:
    """File metadata that tells a file apart from its neighbours, so that a swapped one is noticed."""
    return {"kvtune.part": part, "kvtune.sample": str(sample), "kvtune.layer": str(layer)}
