"""Workloads: what the model reads and is asked, one task a file (registered in ``registry.py``)."""

from __future__ import annotations

from kvtune.workloads.base import Request, Sample, Turn, Workload
from kvtune.workloads.prompts import PromptFile
from kvtune.workloads.registry import get_workload, workload_names, workload_titles

__all__ = [
    "PromptFile",
    "Request",
    "Sample",
    "Turn",
    "Workload",
    "get_workload",
    "workload_names",
    "workload_titles",
]
