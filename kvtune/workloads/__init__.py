"""Workloads: what the model reads and is asked, one task a file (registered in ``registry.py``)."""

from __future__ import annotations

from kvtune.workloads.base import Request, Sample, Turn, Workload

__all__ = ["Request", "Sample", "Turn", "Workload"]
