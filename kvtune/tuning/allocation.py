"""Per-layer budgets: spend the bytes where they lower the error most.

For each layer a ladder of settings is measured; the plan then minimises the sum over layers of the loss
under a cap on the sum of the bytes: a knapsack with one choice per layer. Around each layer's choice finer
settings are measured then, and the knapsack is packed anew, for some rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.progress import Progress, silent
from kvtune.tuning.bench import Bench
from kvtune.tuning.ladder import Setting, ladder, neighbours

ROUNDS = 4
UNITS = 10_000
TAIL_WEIGHT = 1.0
"""Weight of the mean squared error beside the mean error: the tail counts, not only the average."""


@dataclass(frozen=True)
class Rung:
    """One setting of one layer: what it changes, what it costs and what it loses."""

    parameters: dict[str, Any]
    read_bytes: float
    loss: float


def allocate(
    bench: Bench, plan: Plan, max_read_bytes: float, progress: Progress | None = None, rounds: int = ROUNDS
) -> Plan | None:
    """``plan`` with per-layer budgets of least loss within ``max_read_bytes`` a step.

    Settings beside the best so far are measured in ``rounds`` rounds at most, until none of them is better.
    ``None`` if even the cheapest settings read more.
    """
    table = _Table(bench, plan)
    cap = max_read_bytes - table.fixed_bytes()
    longest = bench.context_tokens[1]
    wanted = {layer: ladder(plan.policy) for layer in table.rungs}
    chosen: dict[int, Rung] | None = None
    with (progress or silent).task("per-layer budgets", (1 + rounds) * len(wanted)) as task:
        for _ in range(1 + rounds):
            for layer, settings in wanted.items():
                table.measure(layer, settings)
                task.advance()
            before, chosen = chosen, cheapest_loss(table.rungs, cap)
            if chosen is None:
                return None
            if chosen == before:
                break
            wanted = {
                layer: neighbours(plan.policy, rung.parameters, longest) for layer, rung in chosen.items()
            }
    assert chosen is not None
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


class _Table:
    """Rungs measured so far of each layer that the plan's own policy serves."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self.bench, self.plan = bench, plan
        own = plan.policy.name
        self.rungs: dict[int, list[Rung]] = {
            n: [] for n in bench.layers if plan.for_layer(bench.trace.layer_info(n)).name == own
        }

    def fixed_bytes(self) -> float:
        """Read bytes per step of the other layers."""
        timelines = range(len(self.bench.timelines))
        others = [n for n in self.bench.layers if n not in self.rungs]
        reads = [[self.bench.outcome(self.plan, i, n).read_bytes for i in timelines] for n in others]
        return float(sum(np.concatenate(read).mean() for read in reads))

    def measure(self, layer: int, settings: Iterable[Setting]) -> None:
        """Add a rung for each setting that is new and that the policy allows."""
        known = [rung.parameters for rung in self.rungs[layer]]
        for setting in settings:
            if setting in known:
                continue
            try:
                self.rungs[layer].append(self._rung(layer, setting))
            except InputError:  # a combination that the policy refuses
                continue

    def _rung(self, layer: int, setting: Setting) -> Rung:
        """Measured on every timeline; not kept in the bench, where accesses of all rungs would pile up."""
        policy = get_policy(self.plan.policy.name, {**self.plan.policy.parameters(), **setting})
        timelines = range(len(self.bench.timelines))
        results = [self.bench.evaluate(policy, i, layer) for i in timelines]
        errors = np.concatenate([r.error.numpy().ravel() for r in results]).astype(np.float64)
        read = np.concatenate([r.read_bytes.sum(1).numpy() for r in results]).astype(np.float64)
        return Rung(setting, float(read.mean()), float(errors.mean() + TAIL_WEIGHT * (errors**2).mean()))
