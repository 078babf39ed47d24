"""Timing a body on a device: the median of repeats, by device events on a GPU, by the clock elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

Body = Callable[[], object]

_WARM_UP = 3
"""Calls before a graph is captured, as its documentation asks for."""


def seconds_of(body: Body, device: torch.device, repeats: int, calls: int = 1) -> float:
    """Median time of one call, after some that are not counted.

    ``calls`` are made back to back between two readings of the clock: on a GPU the host's work for all but
    the first passes while the device works.
    """

    def several() -> None:
        for _ in range(calls):
            body()

    several()
    if device.type != "cuda":
        return statistics.median(_elapsed(several) for _ in range(repeats)) / calls
    torch.cuda.synchronize(device)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        several()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times) / calls


def wall_seconds_of(body: Body, device: torch.device, repeats: int) -> float:
    """Median time by the clock until the device is done: what the host sees, launches included."""

    def whole() -> None:
        body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    whole()
    return statistics.median(_elapsed(whole) for _ in range(repeats))


def graphed(
    body: Body,
    device: torch.device,
    warm_up: int = _WARM_UP,
    required: bool = False,
    apart: Sequence[torch.cuda.Stream] = (),
) -> Body | None:
    """``body`` as one replay of a CUDA graph; ``None`` without CUDA or where it cannot be captured.

    ``warm_up`` calls come before. Where a graph is ``required`` on a GPU, the failure is raised instead.
    ``apart``: streams that ``body`` forks to. torch's streams come from a pool, and if the capture got one of
    these, what the body wants side by side would run in turn.
    """
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    while stream in apart:
        stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            body()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            body()
    except RuntimeError:
        if required:
            raise
        torch.cuda.synchronize(device)
        return None

    def replay(_inputs: Body = body) -> None:  # what the graph reads lives as long as the graph does
        graph.replay()

    return replay


def _elapsed(body: Body) -> float:
    start = perf_counter()
    body()
    return perf_counter() - start
