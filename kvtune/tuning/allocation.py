"""Per-layer budgets: spend the bytes where they lower the error most.

For each layer a ladder of settings is measured; the plan then minimises the sum over layers of the loss
under a cap on the sum of the bytes: a knapsack with one choice per layer. Around each layer's choice finer
settings are measured then, and the knapsack is packed anew, for some rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtune.errors import InputError
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.policies.wave_index import WaveIndex
from kvtune.progress import Progress, silent
from kvtune.tuning.bench import Bench
from kvtune.tuning.heads import Measured, splits
from kvtune.tuning.ladder import Setting, ladder, neighbours

ROUNDS = 4
UNITS = 10_000
TAIL_WEIGHT = 1.0
"""Weight of the mean squared error beside the mean error: the tail counts, not only the average."""


@dataclass(frozen=True)
class Rung:
    """One setting of one layer: what it changes, what it costs and what it loses.

    ``retrievals``: the retrieval shares that its kv heads have, where each has its own.
    """

    parameters: dict[str, Any]
    read_bytes: float
    loss: float
    retrievals: tuple[float, ...] = ()


def allocate(
    bench: Bench,
    plan: Plan,
    max_read_bytes: float,
    progress: Progress | None = None,
    *,
    per_head: bool = True,
    rounds: int = ROUNDS,
    fixed: Collection[str] = (),
) -> Plan | None:
    """``plan`` with per-layer budgets of least loss within ``max_read_bytes`` a step.

    Settings beside the best so far are measured in ``rounds`` rounds at most, until none of them is better.
    With ``per_head`` the wave index also spreads a layer's retrieval over its kv heads (``head_shares``).
    No layer changes a ``fixed`` parameter.
    ``None`` if even the cheapest settings read more.
    """
    table = _Table(bench, plan, per_head, fixed)
    cap, longest = max_read_bytes - table.fixed_bytes(), bench.context_tokens[1]
    wanted = {layer: ladder(plan.policy) for layer in table.layers}
    chosen: dict[int, Rung] | None = None
    with (progress or silent).task("per-layer budgets", (1 + rounds) * len(wanted)) as task:
        for _ in range(1 + rounds):
            for layer, settings in wanted.items():
                table.measure(layer, settings)
                task.advance()
            before, chosen = chosen, cheapest_loss(table.rungs(), cap)
            if chosen is None:
                return None
            if chosen == before:
                break
            wanted = {
                layer: neighbours(plan.policy, rung.parameters, longest, set(rung.retrievals))
                for layer, rung in chosen.items()
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
    """What has been measured so far of each layer that the plan's own policy serves."""

    def __init__(self, bench: Bench, plan: Plan, per_head: bool, fixed: Collection[str]) -> None:
        self.bench, self.plan = bench, plan
        self.fixed = {name: plan.policy.parameters()[name] for name in fixed}
        whole = len(bench.trace.kv_heads) == bench.trace.geometry.n_kv_heads
        own_shares = isinstance(plan.policy, WaveIndex) and "head_shares" not in fixed
        self.per_head = per_head and whole and own_shares
        own = plan.policy.name
        self.layers: dict[int, list[Measured]] = {
            n: [] for n in bench.layers if plan.for_layer(bench.trace.layer_info(n)).name == own
        }

    def fixed_bytes(self) -> float:
        """Read bytes per step of the other layers."""
        timelines = range(len(self.bench.timelines))
        others = [n for n in self.bench.layers if n not in self.layers]
        reads = [[self.bench.outcome(self.plan, i, n).read_bytes for i in timelines] for n in others]
        return float(sum(np.concatenate(read).mean() for read in reads))

    def measure(self, layer: int, settings: Iterable[Setting]) -> None:
        """Measure each setting that is new, changes nothing fixed, and that the policy allows."""
        known = [each.setting for each in self.layers[layer]]
        for setting in settings:
            if setting in known or any(setting.get(k, v) != v for k, v in self.fixed.items()):
                continue
            try:
                self.layers[layer].append(self._measured(layer, setting))
            except InputError:  # a combination that the policy refuses
                continue

    def rungs(self) -> dict[int, list[Rung]]:
        """Of each layer, one budget for all kv heads, and the splits over the heads of each index."""
        found = {}
        for layer, measured in self.layers.items():
            rungs = [Rung(m.setting, float(m.read_bytes.sum()), float(m.loss.sum())) for m in measured]
            if self.per_head:
                by_rest: dict[tuple[Any, ...], list[Measured]] = {}
                for each in measured:
                    rest = tuple(value for name, value in each.setting.items() if name != "retrieval")
                    by_rest.setdefault(rest, []).append(each)
                rungs += [rung for alike in by_rest.values() for rung in _split_rungs(alike)]
            found[layer] = rungs
        return found

    def _measured(self, layer: int, setting: Setting) -> Measured:
        """On every timeline; not kept in the bench, where the accesses of all settings would pile up."""
        policy = get_policy(self.plan.policy.name, {**self.plan.policy.parameters(), **setting})
        results = [self.bench.evaluate(policy, i, layer) for i in range(len(self.bench.timelines))]
        read = np.concatenate([r.read_bytes.numpy() for r in results]).astype(np.float64).mean(0)
        errors = np.concatenate([r.error.numpy() for r in results]).astype(np.float64)
        by_head = (errors + TAIL_WEIGHT * errors**2).mean(0).reshape(len(read), -1)
        return Measured(setting, read, by_head.mean(1) / len(read))


def _split_rungs(measured: list[Measured]) -> list[Rung]:
    """Rungs that give kv heads retrieval shares of their own, in settings that share all else."""
    rungs = []
    for split in splits(measured):
        own = tuple(measured[i].setting["retrieval"] for i in split.heads)
        if len(set(own)) > 1:
            mean = round(sum(own) / len(own), 6)
            shares = ",".join(f"{share / mean:.6g}" for share in own)
            parameters = {**measured[0].setting, "retrieval": mean, "head_shares": shares}
            rungs.append(Rung(parameters, split.read_bytes, split.loss, own))
    return rungs
