"""``predict``: cache simulations of a trace as step times, batches and throughput on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvtune.caching import CacheResult
from kvtune.caching.tally import COLD
from kvtune.hardware.break_even import BATCHES, break_even, contexts_up_to
from kvtune.hardware.cost import Offload, check_offload, step_cost
from kvtune.hardware.demand import Demand
from kvtune.hardware.machine import Hardware
from kvtune.hardware.memory import full_memory, max_batch
from kvtune.hardware.traffic import Traffic, full_traffic, wave_traffic
from kvtune.policies.wave_index import WaveIndex


def predict(
    hardware: Hardware,
    demand: Demand,
    curve: Sequence[CacheResult],
    *,
    weights_bytes: float,
    batch: int = 1,
    offload: Offload | None = None,
) -> dict[str, Any]:
    """What each budget of ``curve`` costs on ``hardware``, JSON-ready.

    ``offload`` is by default ``cpu`` where the machine has a link between host and device. Returns ``rows``
    (one a budget: ``step{total_ms, terms, …}, max_batch, tokens_per_second, gpu_bytes``), ``full`` (full
    attention, the same keys), ``break_even`` (at the largest budget; over contexts for the wave index, at
    the trace's own for any other policy), and the ``batch, offload, tokens`` used. Misses are those from an
    empty cache. Raises ``InputError`` as :func:`~kvtune.hardware.cost.step_cost`.
    """
    place: Offload = offload or ("none" if hardware.host_to_device is None else "cpu")
    check_offload(hardware, place)
    geometry = demand.geometry

    def row(traffic: Traffic, where: Offload, memory: Any) -> dict[str, Any]:
        cost = step_cost(hardware, geometry, traffic, batch=batch, weights_bytes=weights_bytes, offload=where)
        return {
            "step": cost.to_dict(),
            "max_batch": max_batch(hardware, memory, weights_bytes),
            "tokens_per_second": cost.tokens_per_second,
            "gpu_bytes": memory.to_dict(),
        }

    rows = [row(demand.traffic(found), place, demand.memory(found.budget, place)) for found in curve]
    full = full_traffic(geometry, demand.tokens)
    return {
        "batch": batch,
        "offload": place,
        "tokens": demand.tokens,
        "rows": rows,
        "full": row(full, "none", full_memory(geometry, demand.longest)),
        "break_even": _break_even(hardware, demand, curve[-1], weights_bytes, batch, place),
    }


def _break_even(
    hardware: Hardware,
    demand: Demand,
    result: CacheResult,
    weights_bytes: float,
    batch: int,
    offload: Offload,
) -> list[dict[str, Any]]:
    geometry, policy, plan = demand.geometry, demand.plan.policy, demand.plan
    if isinstance(policy, WaveIndex) and not plan.overrides:
        wave, (requests, pages) = policy, result.tally.accesses[COLD, :2].tolist()
        # A trace too short for an index says nothing of hits and pages: then count on no hit.
        hits = result.hit_ratio.page if pages else 0.0
        each = pages / requests if pages else None
        contexts = contexts_up_to(max(geometry.max_positions, demand.longest))

        def traffic_at(context: int) -> Traffic:
            return wave_traffic(
                geometry, context, wave, hit_ratio=hits, cluster_pages=each, dense_layers=plan.dense_layers
            )
    else:
        measured = demand.traffic(result)
        contexts = [round(demand.tokens)]

        def traffic_at(context: int) -> Traffic:
            return measured

    batches = sorted({*BATCHES, batch})
    found = break_even(
        hardware, geometry, traffic_at, contexts,
        batches=batches, weights_bytes=weights_bytes, offload=offload,
    )  # fmt: skip
    return [asdict(row) for row in found]
