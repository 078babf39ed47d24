"""From which context and batch on a policy is faster than full attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtune.geometry import ModelGeometry
from kvtune.hardware.cost import Offload, step_cost
from kvtune.hardware.machine import Hardware
from kvtune.hardware.traffic import Traffic, full_traffic

BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class BreakEven:
    """At ``batch``, the policy's step is faster from ``context`` tokens on (``None``: at none tried).

    ``speedup`` is that of the longest context tried: full attention's step ÷ the policy's.
    """

    batch: int
    context: int | None
    speedup: float


def contexts_up_to(longest: int, shortest: int = 1024) -> list[int]:
    """Powers of two from ``shortest``, and ``longest`` itself at the end."""
    powers = []
    while shortest < longest:
        powers.append(shortest)
        shortest *= 2
    return [*powers, longest]


def break_even(
    hardware: Hardware,
    geometry: ModelGeometry,
    traffic_at: Callable[[int], Traffic],
    contexts: Sequence[int],
    *,
    batches: Sequence[int] = BATCHES,
    weights_bytes: float = 0.0,
    offload: Offload = "cpu",
) -> list[BreakEven]:
    """The break-even of each batch: the shortest of ``contexts`` from which on every longer one pays.

    ``contexts`` ascend; ``traffic_at`` gives the policy's traffic at one. Step times alone are compared, both
    with the KV where it then is: neither the memory nor the building of the index counts.
    """
    steps = [(context, traffic_at(context), full_traffic(geometry, context)) for context in contexts]
    rows = []
    for batch in batches:
        start, speedup = None, 0.0
        for context, traffic, full in steps:
            ours = step_cost(
                hardware, geometry, traffic, batch=batch, weights_bytes=weights_bytes, offload=offload
            )
            theirs = step_cost(
                hardware, geometry, full, batch=batch, weights_bytes=weights_bytes, offload="none"
            )
            speedup = theirs.seconds / ours.seconds
            start = None if speedup <= 1 else context if start is None else start
        rows.append(BreakEven(batch, start, speedup))
    return rows
