"""Writes a trace sample by sample: each is whole or absent, and a killed capture resumes to the same bytes.

Until :meth:`TraceWriter.finish`, the folder ``.progress`` holds the sample being written and one JSON file
per complete sample (its segments, tokens, records and checksums). That file's rename is the sample's commit.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

import kvtune
from kvtune.errors import InputError, RunError, TraceError
from kvtune.traces.atomic import move, remove, sync, write_json
from kvtune.traces.files import VectorWriter
from kvtune.traces.integrity import (
    check_header,
    check_size,
    checksum,
    digest,
    footer_checksum,
    is_trace,
    load_manifest,
)
from kvtune.traces.sample_writer import SampleWriter
from kvtune.traces.schema import (
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    MANIFEST_FIELDS,
    SAMPLES,
    SEGMENTS,
    TABLES,
    TOKENS,
    projection_name,
    projection_schema,
    token_table,
)

PROGRESS = ".progress"
_OWNED = (MANIFEST, f"{MANIFEST}.tmp", SAMPLES, SEGMENTS, TOKENS, "kv", "queries", "o_proj", PROGRESS)
"""All that a trace may hold; overwriting removes these and nothing else."""


class TraceWriter:
    """Creates or resumes the trace folder ``path``.

    ``header`` describes the capture (JSON-ready). Needed: ``model``, ``fingerprint``, ``geometry``
    (``ModelGeometry.to_dict()``), ``dtype``, ``layers``, ``kv_heads`` (both ascending) and ``values`` (false:
    keys only). ``sinks`` ({layer: one float per query head}) and ``alibi`` (one float per query head) reach
    ``LayerInfo``; every other field is kept as it is in the manifest.

    ``resume`` continues what is there (nothing there: it starts), ``overwrite`` replaces it. Raises
    ``InputError`` if ``path`` exists and neither is given, if it is not a kvtune trace, or if it was begun
    with another header; ``RunError`` if it can't be written; ``ValueError`` for a header without sense.
    """

    def __init__(
        self, path: str | Path, header: dict[str, Any], resume: bool = False, overwrite: bool = False
    ) -> None:
        self.path = Path(path)
        self.header: dict[str, Any] = json.loads(json.dumps(header, allow_nan=False))
        self.geometry = check_header(self.header)
        self._progress = self.path / PROGRESS
        self._files: dict[int, dict[str, Any]] = {}
        """Complete sample → manifest entries of its files."""
        self._manifest: dict[str, Any] | None = None
        """Set once the trace is complete."""
        if _there(self.path, resume, overwrite):
            self._resume()
        else:
            self._begin()

    @property
    def completed(self) -> set[int]:
        """Samples already whole."""
        if self._manifest is not None:
            return set(range(self._manifest["n_samples"]))
        return set(self._files)

    @contextmanager
    def sample(self, index: int) -> Iterator[SampleWriter]:
        """Write sample ``index``; it appears in the trace when the body ends, and not if the body raises.

        Raises ``RunError`` on a full or failing disk (earlier samples stay), ``ValueError`` if the sample
        is there already or its parts do not fit together.
        """
        if index < 0 or index in self.completed or self._manifest is not None:
            raise ValueError(f"sample {index} of '{self.path}' is there already, or the trace is complete")
        folder = self._progress / f"sample={index}"
        with self.reporting(f"sample {index}"):
            remove(folder)
            folder.mkdir(parents=True)
        writer = SampleWriter(index, folder, self.header, self.geometry, self.reporting)
        try:
            writer.open()
            yield writer
            with self.reporting(f"sample {index}"):
                self._commit(writer, folder)
        finally:
            writer.abandon()
            shutil.rmtree(folder, ignore_errors=True)

    def o_proj(self, layer: int, weight: Tensor) -> None:
        """Keep layer ``layer``'s output projection [hidden, all query heads × dv], in the trace's dtype."""
        dtype = self.header["dtype"]
        dim = self.geometry.n_heads * self.geometry.value_dim
        if weight.ndim != 2 or weight.shape[1] != dim or weight.dtype != DTYPES[dtype]:
            given = f"{list(weight.shape)} {weight.dtype}"
            raise ValueError(f"output projection must be [hidden, {dim}] {dtype}, not {given}")
        if self._manifest is not None:
            return
        target = self.path / projection_name(layer)
        with self.reporting(f"the output projection of layer {layer}"):
            target.parent.mkdir(exist_ok=True)
            file = VectorWriter(self._progress / target.name, projection_schema(layer, dtype, dim))
            try:
                file.write({"weight": weight})
            finally:
                file.close()
            move(file.path, target)

    def finish(self) -> dict[str, Any]:
        """Write the tables and the manifest (``complete: true``, last); returns the manifest.

        Raises ``ValueError`` if the samples are not 0…n-1, ``RunError`` on a full or failing disk.
        """
        if self._manifest is not None:
            return self._manifest
        if self.completed != set(range(len(self.completed))):
            raise ValueError(f"samples 0…{max(self.completed)} expected, {sorted(self.completed)} written")
        with self.reporting("the tables"):
            files = {name: entry for sample in self._files.values() for name, entry in sample.items()}
            files |= self._write_tables()
            for file in self.path.glob("o_proj/layer=*.parquet"):
                files[f"o_proj/{file.name}"] = _entry(file, pq.read_metadata(file).num_rows)
            manifest = self._manifest_of(files, complete=True)
            write_json(self.path / MANIFEST, manifest, indent=1)
            shutil.rmtree(self._progress, ignore_errors=True)
        self._manifest = manifest
        return manifest

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Turn a disk error while writing ``what`` into a ``RunError`` that says what was kept."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if full else (error.strerror or str(error))
            kept = len(self.completed)
            hints = ["free some space"] * full + ["continue with --resume"] * is_trace(self.path)
            raise RunError(
                f"could not write {what} to '{self.path}': {reason}; "
                f"{kept or 'no'} complete sample{'s' if kept != 1 else ''} kept",
                " and ".join(hints) or None,
            ) from error

    def _begin(self) -> None:
        with self.reporting("a new trace"):
            self.path.mkdir(parents=True, exist_ok=True)
            # The manifest goes first and is never absent after: an interrupted overwrite stays recognisable.
            write_json(self.path / MANIFEST, self._manifest_of({}, complete=False), indent=1)
            for name in _OWNED:
                if name != MANIFEST:
                    remove(self.path / name)
            self._progress.mkdir()

    def _resume(self) -> None:
        manifest = load_manifest(self.path)
        begun = {key: value for key, value in manifest.items() if key not in MANIFEST_FIELDS}
        if difference := first_difference(begun, self.header):
            field, before, now = difference
            raise InputError(
                f"'{self.path}' was begun with {field} = {before}, not {now}",
                "use the same settings, or --overwrite to start anew",
            )
        with self.reporting("the resumed trace"):
            if manifest["complete"]:
                remove(self._progress)
                self._manifest = manifest
                return
            self._progress.mkdir(exist_ok=True)
            for file in self._progress.glob("sample=*.json"):
                commit = json.loads(file.read_text(encoding="utf-8"))
                if self._is_whole(commit):
                    self._files[commit["sample"]] = commit["files"]
            self._drop_uncommitted()

    def _is_whole(self, commit: dict[str, Any]) -> bool:
        try:
            for name, entry in commit["files"].items():
                check_size(self.path / name, entry)
        except TraceError:
            return False
        return True

    def _drop_uncommitted(self) -> None:
        kept = {f"sample={index}" for index in self._files}
        for entry in (*self.path.glob("kv/*"), *self.path.glob("queries/*")):
            if entry.name not in kept:
                remove(entry)
        for entry in self._progress.iterdir():
            if entry.name not in {f"{name}.json" for name in kept}:
                remove(entry)

    def _commit(self, writer: SampleWriter, folder: Path) -> None:
        files = {}
        for name, rows in writer.close().items():
            part, file = name.split("/")
            files[f"{part}/{folder.name}/{file}"] = _entry(folder / name, rows)
            sync(folder / name)
        for part in ("kv", "queries"):
            target = self.path / part / folder.name
            target.parent.mkdir(exist_ok=True)
            remove(target)
            sync(folder / part)
            os.replace(folder / part, target)
            sync(target.parent)
        commit = {
            "sample": writer.index,
            "files": files,
            "records": [asdict(record) for record in writer.records],
            "segments": [asdict(segment) for segment in writer.segments],
            "tokens": writer.tokens,
        }
        write_json(self._progress / f"{folder.name}.json", commit)
        self._files[writer.index] = files

    def _manifest_of(self, files: dict[str, Any], complete: bool) -> dict[str, Any]:
        manifest = {
            **self.header,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kvtune_version": kvtune.__version__,
            "n_samples": len(self._files),
            "files": files,
            "complete": complete,
        }
        return {**manifest, "digest": digest(manifest)}

    def _write_tables(self) -> dict[str, Any]:
        """The three tables, one row group per sample, from the commits; returns their manifest entries."""
        rows = dict.fromkeys(TABLES, 0)
        writers = {
            name: pq.ParquetWriter(self._progress / name, schema, compression="none")
            for name, schema in TABLES.items()
        }
        try:
            for sample in sorted(self._files):
                commit = json.loads((self._progress / f"sample={sample}.json").read_text(encoding="utf-8"))
                tables = {
                    SAMPLES: pa.Table.from_pylist(commit["records"], TABLES[SAMPLES]),
                    SEGMENTS: pa.Table.from_pylist(commit["segments"], TABLES[SEGMENTS]),
                    TOKENS: token_table(sample, commit["segments"], commit["tokens"]),
                }
                for name, table in tables.items():
                    writers[name].write_table(table, row_group_size=max(1, len(table)))
                    rows[name] += len(table)
        finally:
            for writer in writers.values():
                writer.close()
        entries = {name: _entry(self._progress / name, rows[name]) for name in TABLES}
        for name in TABLES:
            move(self._progress / name, self.path / name)
        return entries


def first_difference(begun: Any, now: Any, field: str = "") -> tuple[str, Any, Any] | None:
    """The first field, by name, in which two JSON documents differ: its dotted name and both values."""
    if not (isinstance(begun, dict) and isinstance(now, dict)):
        return None if begun == now else (field, begun, now)
    for key in sorted(begun.keys() | now.keys()):
        inner = first_difference(begun.get(key), now.get(key), f"{field}.{key}" if field else key)
        if inner:
            return inner
    return None


def _there(path: Path, resume: bool, overwrite: bool) -> bool:
    """Whether ``path`` holds a trace to resume. Raises ``InputError`` where it may not be touched."""
    if resume and overwrite:
        raise InputError("a trace can be resumed or overwritten, not both")
    if not os.path.lexists(path):
        return False
    empty = path.is_dir() and not any(path.iterdir())
    if not empty and not is_trace(path):
        raise InputError(f"'{path}' exists already and is not a kvtune trace", "choose another folder")
    if not resume and not overwrite:
        raise InputError(
            f"'{path}' exists already", "--resume continues an unfinished trace, --overwrite replaces it"
        )
    return resume and not empty


def _entry(file: Path, rows: int) -> dict[str, Any]:
    """A file's manifest entry."""
    return {
        "rows": rows,
        "bytes": file.stat().st_size,
        "sha256": checksum(file),
        "footer_sha256": footer_checksum(file),
    }
