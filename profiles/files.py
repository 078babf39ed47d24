"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvtune.errors import InputError


def write_text(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8, Unix line ends) under a temporary name beside ``path``, then rename it.

    Folders are made as needed. Readers see the old file or the new one, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_all(folder: Path, files: Mapping[str, str], overwrite: bool) -> list[Path]:
    """Write every ``{relative name: text}`` under ``folder``; the written paths in order.

    Nothing is written where one of them exists and ``overwrite`` is false (``InputError`` naming it), or
    where ``folder`` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder")
    paths = [folder / name for name in files]
    if not overwrite:
        for path in paths:
            refuse_existing(path)
    for path, text in zip(paths, files.values(), strict=True):
        write_text(path, text)
    return paths


def refuse_existing(path: Path) -> None:
    """``InputError`` where ``path`` exists."""
    if path.exists():
        raise InputError(f"{path} exists", "give another --out, or --overwrite to replace it")


def _umask() -> int:
    """The process's umask (there is no way to read it without setting it)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
