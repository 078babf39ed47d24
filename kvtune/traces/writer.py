"""Writes a trace sample by sample: each is whole or absent, and a killed capture resumes to the same bytes.

Until :meth:`TraceWriter.finish`, the folder ``.progress`` holds the sample being written and one small
JSON file per complete sample (its rows and checksums). That file's rename is the sample's commit.
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
from kvtune.errors import InputError, RunError
from kvtune.traces.files import VectorWriter
from kvtune.traces.integrity import check_header, checksum, digest, is_trace, load_manifest
from kvtune.traces.sample_writer import SampleWriter
from kvtune.traces.schema import (
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    MANIFEST_FIELDS,
    SAMPLES,
    SAMPLES_SCHEMA,
    SEGMENTS,
    SEGMENTS_SCHEMA,
    TOKENS,
    TOKENS_SCHEMA,
    projection_name,
    projection_schema,
)

PROGRESS = ".progress"
_OWNED = (MANIFEST, SAMPLES, SEGMENTS, TOKENS, "kv", "queries", "o_proj", PROGRESS)
"""All that a trace may hold; overwriting removes these and nothing else."""


class TraceWriter:
    """Creates or resumes the trace folder ``path``.

    ``header`` describes the capture (JSON-ready). Needed: ``model``, ``fingerprint``, ``geometry``
    (``ModelGeometry.to_dict()``), ``dtype``, ``layers``, ``kv_heads`` (both ascending) and ``values`` (false:
    keys only). ``sinks`` ({layer: one float per query head}) and ``alibi`` (one float per query head) reach
    ``LayerInfo``; every other field is kept as it is in the manifest.

    Raises ``InputError`` if ``path`` exists and neither ``resume`` nor ``overwrite`` is given, if it is not
    a kvtune trace, or if it was begun with another header; ``RunError`` if it can't be written.
    """

    def __init__(
        self, path: str | Path, header: dict[str, Any], resume: bool = False, overwrite: bool = False
    ) -> None:
        self.path = Path(path)
        self.header: dict[str, Any] = json.loads(json.dumps(header, allow_nan=False))
        self.geometry = check_header(self.header)
        self._finished: dict[str, Any] | None = None
        self._commits: dict[int, dict[str, Any]] = {}
        if self._occupied(resume, overwrite):
            self._resume()
        else:
            self._begin()

    @property
    def completed(self) -> set[int]:
        """Samples already whole."""
        if self._finished is not None:
            return set(range(self._finished["n_samples"]))
        return set(self._commits)

    @contextmanager
    def sample(self, index: int) -> Iterator[SampleWriter]:
        """Write sample ``index``; it appears in the trace when the body ends, and not if the body raises.

        Raises ``RunError`` on a full or failing disk (earlier samples stay), ``ValueError`` if the sample
        exists already or its parts do not fit together.
        """
        if index in self.completed or index < 0 or self._finished is not None:
            raise ValueError(f"sample {index} of '{self.path}' can't be written (again)")
        folder = self.path / PROGRESS / f"sample={index}"
        with self.reporting(f"sample {index}"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        writer = SampleWriter(index, folder, self)
        try:
            yield writer
            with self.reporting(f"sample {index}"):
                self._commit(writer, folder)
        finally:
            writer.abandon()
            shutil.rmtree(folder, ignore_errors=True)

    def o_proj(self, layer: int, weight: Tensor) -> None:
        """Keep layer ``layer``'s output projection [hidden, heads × value dimension] (all heads, whole)."""
        dtype = next(name for name, known in DTYPES.items() if known == weight.dtype)
        target = self.path / projection_name(layer)
        if self._finished is not None:
            return
        with self.reporting(f"the output projection of layer {layer}"):
            temporary = self.path / PROGRESS / target.name
            file = VectorWriter(temporary, projection_schema(layer, dtype, weight.shape[1]))
            try:
                file.write({"weight": weight})
            finally:
                file.close()
            target.parent.mkdir(exist_ok=True)
            _move(temporary, target)

    def finish(self) -> dict[str, Any]:
        """Write the tables and the manifest (``complete: true``, last); returns the manifest.

        Raises ``ValueError`` if the samples are not 0…n-1, ``RunError`` on a full or failing disk.
        """
        if self._finished is not None:
            return self._finished
        if sorted(self._commits) != list(range(len(self._commits))):
            raise ValueError(f"samples 0…{max(self._commits)} expected, only {sorted(self._commits)} written")
        with self.reporting("the tables"):
            files = self._write_tables() | self._projection_files()
            for commit in self._commits.values():
                files |= commit["files"]
            manifest = self._manifest(True, files)
            write_json(self.path / MANIFEST, manifest)
            shutil.rmtree(self.path / PROGRESS, ignore_errors=True)
        self._finished = manifest
        return manifest

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Turn a disk error into a ``RunError`` that says what was kept."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full" if full else (error.strerror or str(error))
            kept = len(self.completed)
            samples = (
                "no sample was complete" if not kept else f"{kept} complete sample{'s' * (kept > 1)} kept"
            )
            raise RunError(
                f"could not write {what} to '{self.path}': {reason}; {samples}",
                ("free some space, then " if full else "") + "continue with --resume",
            ) from error

    def _occupied(self, resume: bool, overwrite: bool) -> bool:
        """Whether there is a trace to resume; clears the way for a new one if overwriting."""
        if not os.path.lexists(self.path) or (resume and _is_empty(self.path)):
            return False
        if not (resume or overwrite):
            raise InputError(
                f"'{self.path}' exists already",
                "--resume continues an unfinished trace, --overwrite replaces it"
                if is_trace(self.path)
                else "choose another folder",
            )
        if not is_trace(self.path) and not _is_empty(self.path):
            raise InputError(f"'{self.path}' exists and is not a kvtune trace", "choose another folder")
        return resume

    def _begin(self) -> None:
        with self.reporting("a new trace"):
            self.path.mkdir(parents=True, exist_ok=True)
            # The manifest goes first and is never absent after: an interrupted overwrite stays recognisable.
            write_json(self.path / MANIFEST, self._manifest(False, {}))
            for name in _OWNED:
                if name != MANIFEST:
                    _remove(self.path / name)

    def _resume(self) -> None:
        manifest = load_manifest(self.path)
        begun = {key: value for key, value in manifest.items() if key not in MANIFEST_FIELDS}
        if difference := _difference(begun, self.header):
            field, before, now = difference
            raise InputError(
                f"'{self.path}' was begun with {field} = {before}, not {now}",
                "use the same settings, or --overwrite to start anew",
            )
        with self.reporting("the resumed trace"):
            if manifest["complete"]:
                shutil.rmtree(self.path / PROGRESS, ignore_errors=True)
                self._finished = manifest
                return
            progress = self.path / PROGRESS
            for file in progress.glob("sample=*.json"):
                commit = json.loads(file.read_text(encoding="utf-8"))
                self._commits[commit["sample"]] = commit
            self._drop_uncommitted()

    def _drop_uncommitted(self) -> None:
        committed = {f"sample={index}" for index in self._commits}
        for folder in [
            *self.path.glob("kv/*"),
            *self.path.glob("queries/*"),
            *self.path.glob(f"{PROGRESS}/*"),
        ]:
            if folder.name.removesuffix(".json") not in committed or folder.name.endswith(".tmp"):
                _remove(folder)

    def _commit(self, writer: SampleWriter, folder: Path) -> None:
        rows = writer.close()
        files = {}
        for part in ("kv", "queries"):
            target = self.path / part / folder.name
            target.parent.mkdir(exist_ok=True)
            for file in sorted((folder / part).iterdir()):
                files[f"{part}/{folder.name}/{file.name}"] = describe(file, rows[f"{part}/{file.name}"])
                _sync(file)
            _remove(target)
            _sync(folder / part)
            os.replace(folder / part, target)
            _sync(target.parent)
        commit = {
            "sample": writer.index,
            "files": files,
            "records": [asdict(record) for record in writer.records],
            "segments": [asdict(segment) for segment in writer.segments],
            "tokens": writer.tokens,
        }
        write_json(self.path / PROGRESS / f"{folder.name}.json", commit)
        self._commits[writer.index] = commit

    def _manifest(self, complete: bool, files: dict[str, Any]) -> dict[str, Any]:
        manifest = {
            **self.header,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kvtune_version": kvtune.__version__,
            "n_samples": len(self._commits),
            "files": dict(sorted(files.items())),
            "complete": complete,
        }
        return {**manifest, "digest": digest(manifest)}

    def _write_tables(self) -> dict[str, Any]:
        commits = [self._commits[index] for index in sorted(self._commits)]
        tokens = [
            {"sample": c["sample"], "segment": s["segment"], "position": s["start"] + i, "token": token}
            for c in commits
            for s, ids in zip(c["segments"], c["tokens"])
            for i, token in enumerate(ids)
        ]
        tables = {
            SAMPLES: pa.Table.from_pylist([row for c in commits for row in c["records"]], SAMPLES_SCHEMA),
            SEGMENTS: pa.Table.from_pylist([row for c in commits for row in c["segments"]], SEGMENTS_SCHEMA),
            TOKENS: pa.Table.from_pylist(tokens, TOKENS_SCHEMA),
        }
        files = {}
        for name, table in tables.items():
            temporary = self.path / PROGRESS / name
            temporary.parent.mkdir(exist_ok=True)
            pq.write_table(table, temporary, compression="none")
            files[name] = describe(temporary, len(table))
            _move(temporary, self.path / name)
        return files

    def _projection_files(self) -> dict[str, Any]:
        found = sorted(self.path.glob("o_proj/layer=*.parquet"))
        return {f"o_proj/{file.name}": describe(file, pq.read_metadata(file).num_rows) for file in found}


def describe(file: Path, rows: int) -> dict[str, Any]:
    """A file's manifest entry."""
    return {"rows": rows, "bytes": file.stat().st_size, "sha256": checksum(file)}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write ``document`` atomically, keys sorted."""
    temporary = path.with_name(f"{path.name}.tmp")
    path.parent.mkdir(exist_ok=True)
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, sort_keys=True, allow_nan=False)
        file.write("\n")
    _move(temporary, path)


def _move(temporary: Path, target: Path) -> None:
    _sync(temporary)
    os.replace(temporary, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _difference(begun: Any, now: Any, field: str = "") -> tuple[str, Any, Any] | None:
    """The first field, by name, in which two JSON documents differ: its dotted name and both values."""
    if isinstance(begun, dict) and isinstance(now, dict):
        for key in sorted(begun.keys() | now.keys()):
            inner = _difference(begun.get(key), now.get(key), f"{field}.{key}" if field else key)
            if inner:
                return inner
        return None
    return None if begun == now else (field, begun, now)
