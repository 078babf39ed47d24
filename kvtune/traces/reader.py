"""Opens a trace folder."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from kvtune.errors import InputError, TraceError
from kvtune.geometry import LayerInfo, ModelGeometry
from kvtune.traces.files import VectorFile, empty
from kvtune.traces.integrity import check_file, check_footer, check_size, damaged, load_manifest
from kvtune.traces.layer import reduced
from kvtune.traces.schema import (
    DTYPES,
    MANIFEST,
    SAMPLES,
    SEGMENTS,
    TABLES,
    TOKENS,
    SampleRecord,
    Segment,
    kv_name,
    kv_schema,
    projection_name,
    projection_schema,
    query_name,
    query_schema,
)
from kvtune.traces.timeline import Timeline, branches


def open_trace(path: str | Path, verify: bool = False) -> Trace:
    """Open a complete trace.

    The manifest, every file's size and the three tables are checked at once. With ``verify`` each file of
    vectors is compared with its checksum when it is first read. Raises ``TraceError`` naming the file at
    fault: missing, truncated, corrupt, foreign, of a newer format, or of a capture that did not finish.
    """
    path = Path(path)
    manifest = load_manifest(path)
    if not manifest["complete"]:
        raise TraceError(f"the capture of '{path}' did not finish", "continue it: kvtune capture … --resume")
    for name, entry in manifest["files"].items():
        check_size(path / name, entry)
    return Trace(path, manifest, verify)


class Trace:
    """A complete trace. ``samples`` has one record per (sample, request, turn)."""

    def __init__(self, path: Path, manifest: dict[str, Any], verify: bool = False) -> None:
        self.path = path
        self.manifest = manifest
        try:
            self.geometry = ModelGeometry.from_dict(manifest["geometry"])
            self.dtype = DTYPES[manifest["dtype"]]
        except (KeyError, TypeError) as error:
            raise damaged(path / MANIFEST, f"geometry or dtype not understood: {error}") from None
        self._verify = verify
        self._verified: set[str] = set()
        tables = {name: self._table(name) for name in TABLES}
        self.samples = [SampleRecord(**row) for row in tables[SAMPLES].to_pylist()]
        self._segments: dict[int, list[Segment]] = defaultdict(list)
        for row in tables[SEGMENTS].to_pylist():
            self._segments[row["sample"]].append(Segment(**row))
        self._tokens = torch.from_numpy(tables[TOKENS].column("token").to_numpy().copy())

    @property
    def model(self) -> str:
        return self.manifest["model"]

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers captured, ascending."""
        return tuple(self.manifest["layers"])

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """The kv heads captured, ascending."""
        return tuple(self.manifest["kv_heads"])

    @property
    def has_values(self) -> bool:
        return self.manifest["values"]

    @property
    def n_samples(self) -> int:
        return self.manifest["n_samples"]

    def segments(self, sample: int) -> list[Segment]:
        """The segment tree of one sample, by id. Raises ``InputError`` if there is no such sample."""
        if not 0 <= sample < self.n_samples:
            raise InputError(f"the trace has no sample {sample}", f"it has samples 0…{self.n_samples - 1}")
        return self._segments[sample]

    def timelines(self, sample: int) -> list[Timeline]:
        """One timeline per request, plus one per turn whose answer was replaced by the reference."""
        return [
            Timeline(self, sample, index, branch)
            for index, branch in enumerate(branches(self.segments(sample)))
        ]

    def tokens(self, sample: int, segment: int) -> Tensor:
        """[length] int64, the tokens of one segment."""
        first, count = self._token_rows[sample, segment]
        return self._tokens[first : first + count].to(torch.int64)

    def layer_info(self, layer: int) -> LayerInfo:
        """Layer ``layer`` reduced to the heads held, with the sinks and ALiBi slopes of the manifest."""
        sinks = self.manifest.get("sinks", {}).get(str(layer))
        alibi = self.manifest.get("alibi")
        info = replace(
            self.geometry.layer(layer),
            sinks=None if sinks is None else tuple(sinks),
            alibi=None if alibi is None else tuple(alibi),
        )
        return reduced(info, self.kv_heads)

    def kv_file(self, sample: int, layer: int) -> VectorFile:
        value_dim = self.geometry.value_dim if self.has_values else None
        schema = kv_schema(sample, layer, self.manifest["dtype"], self.geometry.head_dim, value_dim)
        return self._open(kv_name(sample, layer), schema)

    def query_file(self, sample: int, layer: int) -> VectorFile:
        schema = query_schema(sample, layer, self.manifest["dtype"], self.geometry.head_dim)
        return self._open(query_name(sample, layer), schema)

    def o_proj(self, layer: int) -> Tensor | None:
        """Output projection [hidden, Hq × dv] of the heads held, or ``None`` if it was not captured."""
        name = projection_name(layer)
        if name not in self.manifest["files"]:
            return None
        geometry = self.geometry
        dim = geometry.n_heads * geometry.value_dim
        file = self._open(name, projection_schema(layer, self.manifest["dtype"], dim))
        weight = empty((file.rows(0), dim), self.dtype)
        file.copy_into(weight, 0, "weight")
        by_head = weight.unflatten(1, (geometry.n_kv_heads, geometry.group * geometry.value_dim))
        return by_head[:, list(self.kv_heads)].flatten(1)

    def _open(self, name: str, schema: pa.Schema) -> VectorFile:
        file, entry = self._file(name)
        if self._verify and name not in self._verified:
            check_file(file, entry)
            self._verified.add(name)
        check_footer(file, entry)
        return VectorFile(file, schema)

    def _file(self, name: str) -> tuple[Path, dict[str, Any]]:
        try:
            return self.path / name, self.manifest["files"][name]
        except KeyError:
            raise damaged(self.path / MANIFEST, f"it does not list {name}") from None

    def _table(self, name: str) -> pa.Table:
        file, entry = self._file(name)
        check_file(file, entry)
        try:
            return pq.ParquetFile(file).read().cast(TABLES[name])
        except (pa.ArrowException, OSError, ValueError) as error:
            raise damaged(file, error) from error

    @cached_property
    def _token_rows(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(sample, segment) → its first row in the token table, its length."""
        rows, first = {}, 0
        for sample in sorted(self._segments):
            for segment in self._segments[sample]:
                rows[sample, segment.segment] = (first, segment.length)
                first += segment.length
        return rows
