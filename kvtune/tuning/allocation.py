"""Per-layer budgets: spend the bytes where they lower the error most.

For each layer a ladder of settings is measured; the plan then minimises the sum over layers of the loss
under a cap on the sum of the bytes: a knapsack with one choice per layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.progress import Progress, silent
from kvtune.tuning.bench import Bench

RETRIEVAL_STEPS = (0.35, 0.7, 1.0, 1.4, 2.8, 5.6)
BUDGET_STEPS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0, 8.0)
CLUSTER_TOKENS = (8, 16, 32, 64)
UNITS = 10_000
TAIL_WEIGHT = 1.0
"""Weight of the mean squared error beside the mean error: the tail counts, not only the average."""


@dataclass(frozen=True)
class Rung:
    """One setting of one layer: what it changes, what it costs and what it loses."""

    parameters: dict[str, Any]
    read_bytes: float
    loss: float


def ladder(plan: Plan) -> list[dict[str, Any]]:
    """Settings to try in each layer: multiples of the plan's budget.

    For the wave index also how the bytes are split: cluster size (few large clusters are cheap to scan, many
    small ones precise) and the share estimated (the plan's, or all the rest).
    """
    policy = plan.policy
    parameters = policy.parameters()
    if policy.name != "wave_index":
        if policy.budget is None:
            return [{}]
        base = parameters[policy.budget]
        return [{policy.budget: type(base)(max(base * step, 1))} for step in BUDGET_STEPS]
    rungs: list[dict[str, Any]] = []
    for tokens in sorted({*CLUSTER_TOKENS, parameters["tokens_per_centroid"]}):
        for step in RETRIEVAL_STEPS:
            retrieval = round(min(parameters["retrieval"] * step, 1.0), 6)
            for estimation in sorted({parameters["estimation"], 1.0}):
                estimation = round(min(estimation, 1.0 - retrieval), 6)
                rungs.append(
                    {"tokens_per_centroid": tokens, "retrieval": retrieval, "estimation": estimation}
                )
    return [dict(pairs) for pairs in sorted({tuple(r.items()) for r in rungs})]


def allocate(
    bench: Bench, plan: Plan, max_read_bytes: float, progress: Progress | None = None
) -> Plan | None:
    """``plan`` with per-layer budgets of least loss within ``max_read_bytes`` a step.

    ``None`` if even the cheapest settings read more.
    """
    settings = ladder(plan)
    free = [n for n in bench.layers if _free(bench, plan, n)]
    fixed = sum(_measured(bench, plan, n, {}).read_bytes for n in bench.layers if n not in free)
    rungs: dict[int, list[Rung]] = {}
    with (progress or silent).task("per-layer budgets", len(free)) as task:
        for layer in free:
            rungs[layer] = [_measured(bench, plan, layer, setting) for setting in settings]
            task.advance()
    chosen = cheapest_loss(rungs, max_read_bytes - fixed)
    if chosen is None:
        return None
    defaults = plan.policy.parameters()
    for layer, rung in chosen.items():
        changed = {k: v for k, v in rung.parameters.items() if v != defaults[k]}
        if changed:
            plan = plan.with_layer(layer, **changed)
    return plan


def cheapest_loss(rungs: dict[int, list[Rung]], cap: float) -> dict[int, Rung] | None:
    """One rung a layer, of least total loss with total bytes ≤ ``cap``; ``None`` if none fits.

    Multiple-choice knapsack by dynamic programming over ``UNITS`` parts of the cap. Bytes are rounded up to
    whole parts, so a choice may fit although its parts are up to one a layer too many: those are tried
    first, and kept if their bytes fit.
    """
    if cap <= 0:
        return None
    most = UNITS + len(rungs)
    best = np.zeros(most + 1)
    picks = []
    for options in rungs.values():
        table = np.full((len(options), most + 1), np.inf)
        for row, rung in zip(table, options):
            weight = _parts(rung, cap)
            if weight <= most:
                row[weight:] = best[: most + 1 - weight] + rung.loss
        picks.append(table.argmin(0))
        best = table.min(0)
    for parts in range(most, UNITS - 1, -1):
        if math.isinf(best[parts]):
            return None
        chosen = _walk_back(rungs, picks, parts, cap)
        if sum(rung.read_bytes for rung in chosen.values()) <= cap:
            return chosen
    return None


def _walk_back(
    rungs: dict[int, list[Rung]], picks: list[NDArray[np.intp]], parts: int, cap: float
) -> dict[int, Rung]:
    """The rungs behind the best total of ``parts`` parts."""
    chosen = {}
    for layer, pick in zip(reversed(rungs), reversed(picks)):
        chosen[layer] = rungs[layer][pick[parts]]
        parts -= _parts(chosen[layer], cap)
    return {layer: chosen[layer] for layer in rungs}


def _parts(rung: Rung, cap: float) -> int:
    """Bytes of a rung in parts of the cap, rounded up."""
    return math.ceil(rung.read_bytes / cap * UNITS)


def _free(bench: Bench, plan: Plan, layer: int) -> bool:
    """Whether the plan's own policy serves the layer."""
    return plan.for_layer(bench.trace.layer_info(layer)).name == plan.policy.name


def _measured(bench: Bench, plan: Plan, layer: int, setting: dict[str, Any]) -> Rung:
    policy = get_policy(plan.policy.name, {**plan.policy.parameters(), **setting})
    alone = Plan(policy, plan.dense_layers)
    outcomes = [bench.outcome(alone, i, layer) for i in range(len(bench.timelines))]
    errors = np.concatenate([o.errors.ravel() for o in outcomes]).astype(np.float64)
    read = np.concatenate([o.read_bytes for o in outcomes])
    return Rung(setting, float(read.mean()), float(errors.mean() + TAIL_WEIGHT * (errors**2).mean()))
