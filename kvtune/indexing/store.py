"""A folder of indexes: one checksummed file per unit and a manifest, whole or absent.

``manifest.json`` (format, versions, the trace's model and digest, kind, metric, parameters, one entry per
file) is written last, in a temporary folder beside the target that is then renamed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvtune import __version__
from kvtune.caching.access_log import Unit
from kvtune.clustering.faiss_index import FaissIndex
from kvtune.clustering.key_index import IndexSpec
from kvtune.errors import InputError
from kvtune.indexing.kmeans_index import KMeansIndex
from kvtune.traces.atomic import remove, sync, write_json
from kvtune.traces.integrity import checksum, digest

FORMAT, FORMAT_VERSION = "kvtune-index", 1
MANIFEST = "manifest.json"
REBUILD = "build it again: kvtune index build"
KeyIndex = FaissIndex | KMeansIndex

_FIELDS = ("kvtune_version", "trace", "kind", "metric", "parameters", "seed", "files", "digest")
_ENTRY = ("sample", "timeline", "layer", "kv_head", "file", "bytes", "sha256", "keys", "dim", "item_bytes")


def index_class(kind: str) -> type[FaissIndex] | type[KMeansIndex]:
    """The class that holds indexes of ``kind``."""
    return KMeansIndex if kind == "kmeans" else FaissIndex


@dataclass(frozen=True)
class IndexFolder:
    """An index folder whose manifest has been checked; files are checked as they are loaded."""

    path: Path
    manifest: dict[str, Any]

    @property
    def spec(self) -> IndexSpec:
        """What was asked for: counts left to the index are 0 here, and resolved in each entry."""
        m = self.manifest
        return IndexSpec.of(m["kind"], m["parameters"], m["metric"])

    @cached_property
    def entries(self) -> dict[Unit, dict[str, Any]]:
        """Manifest entries by (sample, timeline, layer, kv_head)."""
        return {
            (entry["sample"], entry["timeline"], entry["layer"], entry["kv_head"]): entry
            for entry in self.manifest["files"]
        }

    def load(self, unit: Unit) -> KeyIndex:
        """The index of one unit, checked against its checksum.

        Raises ``InputError`` naming the file that is missing, damaged or not what the manifest says.
        """
        if unit not in self.entries:
            sample, timeline, layer, head = unit
            where = f"sample {sample}, timeline {timeline}, layer {layer}, kv head {head}"
            raise InputError(f"'{self.path}' has no index of {where}", "see 'kvtune index show'")
        entry = self.entries[unit]
        file = self.path / entry["file"]
        self._check(entry)
        spec = self.spec.changed(entry["parameters"])
        index = index_class(spec.kind).load(file, spec, entry["item_bytes"])
        if (len(index), index.dim) != (entry["keys"], entry["dim"]):
            raise InputError(f"'{file}' does not hold the keys that its manifest says", REBUILD)
        return index

    def verify(self) -> None:
        """Check every file's size and checksum. Raises ``InputError`` naming the first at fault."""
        for entry in self.entries.values():
            self._check(entry)

    def _check(self, entry: dict[str, Any]) -> None:
        file = self.path / entry["file"]
        try:
            size = file.stat().st_size
        except OSError:
            raise InputError(f"'{file}' is missing", REBUILD) from None
        if size != entry["bytes"]:
            raise InputError(f"'{file}' is damaged: {size} bytes instead of {entry['bytes']}", REBUILD)
        if checksum(file) != entry["sha256"]:
            raise InputError(f"'{file}' is damaged: its checksum does not match the manifest", REBUILD)


def open_index(path: str | Path) -> IndexFolder:
    """Open a folder that :func:`~kvtune.indexing.build_index` wrote.

    Raises ``InputError`` for a missing, foreign, damaged or newer-format one, naming the file.
    """
    path = Path(path)
    file = path / MANIFEST
    if not path.exists():
        raise InputError(f"there is no index at '{path}'", "kvtune index build makes one")
    manifest = _read(file)
    if manifest is None:
        raise InputError(f"'{path}' is not a kvtune index folder")
    version = manifest.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise InputError(
            f"'{file}' has index format {version}; this kvtune reads formats up to {FORMAT_VERSION}",
            "upgrade kvtune",
        )
    whole = version == FORMAT_VERSION and all(key in manifest for key in _FIELDS)
    if not whole or manifest["digest"] != digest(manifest):
        raise InputError(f"'{file}' is damaged: its digest does not match its content", REBUILD)
    return IndexFolder(path, manifest)


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse a target that exists, or that is no index where it may be replaced. Raises ``InputError``."""
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise InputError(f"'{path}' exists already", "use --overwrite, or another --out")
    if _read(path / MANIFEST) is None:
        raise InputError(f"'{path}' exists and is not a kvtune index: it is not replaced")


class IndexWriter:
    """Collects index files in a temporary folder; use :func:`new_index`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: list[dict[str, Any]] = []

    def add(self, unit: Unit, index: KeyIndex) -> dict[str, Any]:
        """Write the index of one unit; its manifest entry."""
        sample, timeline, layer, head = unit
        suffix = "npz" if index.spec.kind == "kmeans" else "faiss"
        name = f"sample={sample}/timeline={timeline}/layer={layer}/head={head}.{suffix}"
        file = self._folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        index.save(file)
        sync(file)
        values = (*unit, name, file.stat().st_size, checksum(file), len(index), index.dim, index.item_bytes)
        entry = {
            **dict(zip(_ENTRY, values)),
            "parameters": dict(index.spec.parameters),
            "structure_bytes": index.structure_bytes(),
            "notes": index.notes,
        }
        self.files.append(entry)
        return entry

    def finish(self, header: dict[str, Any]) -> dict[str, Any]:
        """Write the manifest: ``header`` and what every index folder has."""
        manifest = {
            **header,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kvtune_version": __version__,
            "files": self.files,
        }
        manifest["digest"] = digest(manifest)
        write_json(self._folder / MANIFEST, manifest, indent=1)
        return manifest


@contextmanager
def new_index(path: Path, overwrite: bool = False) -> Iterator[IndexWriter]:
    """Write an index folder: it appears at ``path`` when the body ends, and not at all if the body raises.

    Raises ``InputError`` as :func:`check_target` does.
    """
    check_target(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (path.with_name(f".{path.name}.{word}-{os.getpid()}") for word in ("new", "old"))
    remove(temporary)
    temporary.mkdir()
    try:
        yield IndexWriter(temporary)
        replacing = path.exists()
        if replacing:
            os.replace(path, old)
        try:
            os.replace(temporary, path)
        except BaseException:
            if replacing:
                os.replace(old, path)
            raise
        sync(path.parent)
    finally:
        remove(temporary)
    remove(old)


def _read(file: Path) -> dict[str, Any] | None:
    """The manifest, if it is one of an index folder of any version."""
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None
