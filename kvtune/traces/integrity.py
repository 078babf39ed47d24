"""Is this folder a whole, unharmed trace? Every refusal names the file at fault."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvtune.errors import TraceError
from kvtune.geometry import ModelGeometry
from kvtune.traces.schema import (
    DTYPES,
    FORMAT,
    FORMAT_VERSION,
    HEADER_FIELDS,
    MANIFEST,
    MANIFEST_FIELDS,
)

RECAPTURE = "capture it again, or restore the folder from a copy"


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def footer_checksum(path: Path) -> str:
    """SHA-256 of a Parquet file's footer: its schema, layout and statistics, a few kilobytes at the end.

    Always checked before Arrow sees the file: a footer with a flipped bit can bring the process down.
    """
    with path.open("rb") as file:
        end = file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, end - length))
        return hashlib.sha256(file.read()).hexdigest()


def digest(manifest: dict[str, Any]) -> str:
    """SHA-256 over the manifest's content, its own ``digest`` field left out."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_trace(path: Path) -> bool:
    """Whether ``path`` is a kvtune trace folder, whole or unfinished, of any format version."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def load_manifest(path: Path) -> dict[str, Any]:
    """Read and check ``manifest.json``. Unfinished captures pass: see ``complete``.

    Raises ``TraceError`` for a missing, foreign, damaged or newer-format manifest.
    """
    file = path / MANIFEST
    if not path.exists():
        raise TraceError(f"there is no trace at '{path}'", "kvtune capture makes one")
    if not file.is_file():
        raise TraceError(f"'{path}' is not a kvtune trace: it has no {MANIFEST}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(file, error) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise TraceError(f"'{file}' is not a kvtune trace manifest")
    version = manifest.get("format_version")
    if type(version) is not int or version < 1:
        raise damaged(file, f"its format version is {version}")
    if version > FORMAT_VERSION:
        raise TraceError(
            f"'{file}' has trace format {version}; this kvtune reads formats up to {FORMAT_VERSION}",
            "upgrade kvtune",
        )
    missing = [key for key in (*MANIFEST_FIELDS, *HEADER_FIELDS) if key not in manifest]
    if missing:
        raise damaged(file, f"it lacks {', '.join(missing)}")
    if manifest["digest"] != digest(manifest):
        raise damaged(file, "its digest does not match its content")
    return manifest


def check_header(header: dict[str, Any]) -> ModelGeometry:
    """The header's geometry. Raises ``ValueError`` where a field is missing or contradicts it."""
    missing = [key for key in HEADER_FIELDS if key not in header]
    if missing:
        raise ValueError(f"trace header lacks {', '.join(missing)}")
    clash = [key for key in header if key in MANIFEST_FIELDS]
    if clash:
        raise ValueError(f"trace header may not hold {', '.join(clash)}")
    if header["dtype"] not in DTYPES:
        raise ValueError(f"trace dtype must be one of {', '.join(DTYPES)}, not '{header['dtype']}'")
    geometry = ModelGeometry.from_dict(header["geometry"])
    for key, count in (("layers", geometry.n_layers), ("kv_heads", geometry.n_kv_heads)):
        chosen = header[key]
        if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= count:
            raise ValueError(f"trace header: {key} must be ascending, within 0…{count - 1}, not {chosen}")
    return geometry


def check_size(file: Path, entry: dict[str, Any]) -> None:
    """``file`` has the size its manifest ``entry`` records. Raises ``TraceError`` naming it."""
    try:
        size = os.stat(file).st_size
    except OSError:
        raise TraceError(f"'{file}' is missing", RECAPTURE) from None
    if size != entry["bytes"]:
        kind = "truncated" if size < entry["bytes"] else "too long"
        raise damaged(file, f"{kind}, {size} bytes instead of {entry['bytes']}")


def check_file(file: Path, entry: dict[str, Any]) -> None:
    """``file`` has the size and checksum its manifest ``entry`` records. Raises ``TraceError`` naming it."""
    check_size(file, entry)
    if checksum(file) != entry["sha256"]:
        raise damaged(file, "its checksum does not match the manifest")


def check_footer(file: Path, entry: dict[str, Any]) -> None:
    """``file`` has the size and footer its manifest ``entry`` records. Raises ``TraceError`` naming it."""
    check_size(file, entry)
    if footer_checksum(file) != entry["footer_sha256"]:
        raise damaged(file, "its footer does not match the manifest")


def damaged(file: Path, reason: object) -> TraceError:
    """The error for a file whose content is not what was written; of ``reason`` its first line is shown."""
    line = (str(reason).splitlines() or [type(reason).__name__])[0]
    return TraceError(f"'{file}' is damaged: {line}", RECAPTURE)


def check_finite(
    vectors: Tensor, *, sample: int, layer: int, heads: Sequence[int], positions: Tensor, what: str = "key"
) -> None:
    """Refuse NaN and infinity in ``vectors`` [H, N, d], whose rows are ``heads`` [H] and ``positions`` [N].

    Raises ``TraceError`` naming sample, layer, head and position of the first one (by head, then position).
    """
    if not vectors.numel() or all(torch.isfinite(end) for end in torch.aminmax(vectors)):
        return  # aminmax passes NaN on and runs at memory speed; isfinite alone is 30 times slower
    finite = torch.isfinite(vectors).all(-1)
    head, row = torch.nonzero(~finite)[0].tolist()
    value = vectors[head, row]
    bad = "NaN" if bool(torch.isnan(value).any()) else "infinite"
    raise TraceError(
        f"the {what} of sample {sample}, layer {layer}, head {heads[head]}, "
        f"position {int(positions[row])} is {bad}",
        "the model overflowed there: capture again with another dtype",
    )
