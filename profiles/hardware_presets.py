"""Machines that kvtune ships: one measured, the others from data sheets, as their ``source`` says."""

from __future__ import annotations

from pathlib import Path

from kvtune.errors import InputError
from kvtune.hardware import Hardware, read_hardware

_FOLDER = Path(__file__).parent / "hardware"


def preset_names() -> list[str]:
    """What :func:`load_hardware` takes by name, in alphabetical order."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A machine by its preset's name (in any case), or from a YAML file as ``kvtune calibrate`` writes it.

    Raises ``InputError`` for what is neither, listing the names, and for a bad file.
    """
    names = preset_names()
    text = str(name_or_path)
    if text.lower() in names:
        return read_hardware(_FOLDER / f"{text.lower()}.yaml")
    path = Path(name_or_path)
    if text and (path.exists() or path.suffix.lower() in (".yaml", ".yml") or len(path.parts) > 1):
        return read_hardware(path)
    raise InputError(f"unknown hardware '{text}'", f"known: {', '.join(names)}; or name a YAML file")
