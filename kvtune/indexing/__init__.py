"""Searchable indexes of a trace's keys: built, kept in folders, and measured on the decode queries."""

from __future__ import annotations

from kvtune.indexing.building import build_index
from kvtune.indexing.curve import recall_curve
from kvtune.indexing.store import IndexFolder, open_index

__all__ = ["IndexFolder", "build_index", "open_index", "recall_curve"]
