"""The trace format: folder layout, Parquet schemas, and the rows that users see.

A trace is a folder: ``manifest.json``, the tables ``samples``, ``segments`` and ``tokens`` (Parquet), and
vectors in ``kv/sample=S/layer=L.parquet``, ``queries/sample=S/layer=L.parquet`` and, optionally,
``o_proj/layer=L.parquet``. Vectors are ``FixedSizeBinary``, bit for bit what the dot product sees, with
dtype and dimension in the field's metadata.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import torch

FORMAT = "kvtune-trace"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SAMPLES, SEGMENTS, TOKENS = "samples.parquet", "segments.parquet", "tokens.parquet"
ROW_GROUP_BYTES = 64 << 20
"""A segment × kv_head above this many bytes of vectors is split over several row groups."""

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


SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("request", pa.int32(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("reference", pa.string()),
        pa.field("generated", pa.string(), nullable=False),
        pa.field("score", pa.float64()),
    ]
)
SEGMENTS_SCHEMA = pa.schema(
    [
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("request", pa.int32(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("parent", pa.int32(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
    ]
)
TOKENS_SCHEMA = pa.schema(
    [pa.field(name, pa.int32(), nullable=False) for name in ("sample", "segment", "position", "token")]
)


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
    """Rows of one layer's output projection: one row per output feature, ``dim`` = heads × value dimension."""
    return pa.schema([_vectors("weight", dtype, dim)], metadata=_whose("o_proj", -1, layer))


def kv_name(sample: int, layer: int) -> str:
    return f"kv/sample={sample}/layer={layer}.parquet"


def query_name(sample: int, layer: int) -> str:
    return f"queries/sample={sample}/layer={layer}.parquet"


def projection_name(layer: int) -> str:
    return f"o_proj/layer={layer}.parquet"


def table_of(rows: list[Any], schema: pa.Schema) -> pa.Table:
    """Dataclass rows as an Arrow table."""
    return pa.Table.from_pylist([asdict(row) for row in rows], schema)


def _ids(*names: str) -> list[pa.Field]:
    return [pa.field(name, pa.int32(), nullable=False) for name in names]


def _vectors(name: str, dtype: str, dim: int) -> pa.Field:
    width = dim * DTYPES[dtype].itemsize
    return pa.field(name, pa.binary(width), nullable=False, metadata={"dtype": dtype, "dimension": str(dim)})


def _whose(part: str, sample: int, layer: int) -> dict[str, str]:
    """File metadata that tells a file apart from its neighbours, so that a swapped one is noticed."""
    return {"kvtune.part": part, "kvtune.sample": str(sample), "kvtune.layer": str(layer)}
