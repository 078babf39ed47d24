"""The tasks by name. A new task is one file and one row here."""

from __future__ import annotations

from kvtune.errors import unknown
from kvtune.workloads.base import Workload
from kvtune.workloads.code_search import CodeSearch
from kvtune.workloads.niah_multiquery import NiahMultiquery
from kvtune.workloads.niah_single import NiahSingle

_WORKLOADS: tuple[type[Workload], ...] = (
    NiahSingle,
    NiahMultiquery,
    CodeSearch,
)


def get_workload(name: str) -> Workload:
    """The task called ``name``. Raises ``InputError`` with a suggestion if there is none."""
    for workload in _WORKLOADS:
        if workload.name == name:
            return workload()
    raise unknown("task", name, workload_names())


def workload_names() -> list[str]:
    """All task names, in the registry's order."""
    return [workload.name for workload in _WORKLOADS]


def workload_titles() -> dict[str, str]:
    """What each task asks, in a few words, by name."""
    return {workload.name: workload.title for workload in _WORKLOADS}
