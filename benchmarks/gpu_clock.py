"""How long a call takes on a GPU, shared by the benchmarks there."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from kvtune.hardware import clock


def milliseconds(body: Callable[[], object], repeats: int = 20) -> float:
    """Median time of one call between device events, after three calls that are not counted."""
    for _ in range(3):
        body()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        body()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graphed(body: Callable[[], object], calls: int = 5, repeats: int = 7) -> float:
    """Median time of one call of ``calls`` in a CUDA graph: what the device takes, launches apart."""

    def several() -> None:
        for _ in range(calls):
            body()

    replay = clock.graphed(several, torch.device("cuda"), required=True)
    assert replay is not None
    return milliseconds(replay, repeats) / calls
