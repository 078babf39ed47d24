"""Files that are whole or absent: written under a temporary name, flushed, renamed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Any, indent: int | None = None) -> None:
    """Write ``document`` with sorted keys: equal documents are equal files."""
    temporary = path.with_name(f"{path.name}.tmp")
    text = json.dumps(document, indent=indent, sort_keys=True, allow_nan=False)
    temporary.write_text(f"{text}\n", encoding="utf-8")
    move(temporary, path)


def move(temporary: Path, target: Path) -> None:
    """Give a written file its name, on disk when this returns."""
    sync(temporary)
    os.replace(temporary, target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a whole folder, if there is one. A link is removed, not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
