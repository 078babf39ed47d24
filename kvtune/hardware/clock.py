"""Timing a body on a device: the median of repeats, by device events on a GPU, by the clock elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch

Body = Callable[[], object]

_WARM_UP = 3
"""Calls before a graph is captured, as its documentation asks for."""


def seconds_of(body: Body, device: torch.device, repeats: int) -> float:
    """Median time of one call, after one that is not counted."""
    body()
    if device.type != "cuda":
        return statistics.median(_elapsed(body) for _ in range(repeats))
    torch.cuda.synchronize(device)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        body()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def wall_seconds_of(body: Body, device: torch.device, repeats: int) -> float:
    """Median time by the clock until the device is done: what the host sees, launches included."""

    def whole() -> None:
        body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    whole()
    return statistics.median(_elapsed(whole) for _ in range(repeats))


def graphed(body: Body, device: torch.device) -> Body | None:
    """``body`` as one replay of a CUDA graph; ``None`` without CUDA or where it cannot be captured."""
    if device.type != "cuda":
        return None
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            body()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            body()
    except RuntimeError:
        torch.cuda.synchronize(device)
        return None

    def replay(_inputs: Body = body) -> None:  # what the graph reads lives as long as the graph does
        graph.replay()

    return replay


def _elapsed(body: Body) -> float:
    start = perf_counter()
    body()
    return perf_counter() - start
