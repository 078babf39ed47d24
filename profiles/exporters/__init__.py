"""Exporters: one file an engine, one row of the registry an engine version."""

from __future__ import annotations

from kvtune.profiles.exporters.base import MANIFEST, Export, NotExpressible
from kvtune.profiles.exporters.registry import (
    engines,
    engines_for,
    export_profile,
    get_exporter,
    write_export,
)

__all__ = [
    "MANIFEST",
    "Export",
    "NotExpressible",
    "engines",
    "engines_for",
    "export_profile",
    "get_exporter",
    "write_export",
]
