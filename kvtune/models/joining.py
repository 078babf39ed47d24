"""A file that packages hold in parts, joined once in the user's cache.

Such a package may offer a function that joins its parts. It is not called: a packaged model brings data,
no code that runs here, and joining is copying. The sum of the whole file is the catalogue's, so that nothing
else passes for it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvtune.errors import InputError, RunError
from kvtune.models.cache import cache_folder
from kvtune.traces.atomic import move

_BLOCK = 1 << 20


def joined_file(name: str, sha256: str) -> Path:
    """Where the joined file of model ``name`` lies, or will. The name carries its sum."""
    return cache_folder() / "models" / f"{name}-{sha256[:16]}.gguf"


def join(name: str, parts: Sequence[Path], sha256: str) -> Path:
    """The file that ``parts`` make in their order, written if need be: whole and of this sum, or not at all.

    ``sha256`` is the hexadecimal SHA-256 of the whole. Raises ``InputError`` if the parts make another file,
    ``RunError`` if it cannot be written.
    """
    target = joined_file(name, sha256)
    if target.is_file():
        return target
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        temporary = Path(made)
        if _copy(parts, descriptor) != sha256:
            raise InputError(
                f"the installed parts of model '{name}' make another file than kvtune knows (by its SHA-256)",
                "reinstall its packages with pip install --force-reinstall",
            )
        temporary.chmod(0o644)
        move(temporary, target)
    except OSError as error:
        raise RunError(
            f"the parts of model '{name}' could not be joined in '{target.parent}': {error}",
            "free some space, or set KVTUNE_CACHE to a folder on another disk",
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return target


def _copy(parts: Sequence[Path], descriptor: int) -> str:
    """Write the parts one after the other; returns the SHA-256 of what was written."""
    digest = hashlib.sha256()
    with os.fdopen(descriptor, "wb") as out:
        for part in parts:
            with part.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
                    out.write(block)
    return digest.hexdigest()
