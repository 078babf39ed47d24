"""``simulate``: what a block cache of given sizes would have hit, from an access log or a trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtune.caching.access_log import AccessLog, Unit, UnitAccesses
from kvtune.caching.base import Cache
from kvtune.caching.registry import get_cache
from kvtune.caching.tally import COLD, PAGE, TOKEN, WARM, WARM_UP_STEPS, HitRatio, Tally
from kvtune.errors import InputError
from kvtune.geometry import PAGE_TOKENS
from kvtune.progress import Progress, silent

if TYPE_CHECKING:
    from kvtune.policies.base import Policy
    from kvtune.policies.plan import Plan
    from kvtune.traces import Trace


@dataclass
class UnitResult:
    """One unit at one budget.

    ``capacity`` in pages; ``tally`` has that one capacity; ``page_hits`` [sum of pages] says of each page
    access whether it hit (``None`` unless asked for; ``pages.request_hits`` folds it to requests).
    """

    capacity: int
    tally: Tally
    page_hits: NDArray[np.bool_] | None = None


@dataclass
class CacheResult:
    """One budget: all units together, and each.

    cache, title      replacement policy by name, and as results are labelled
    budget            cache fraction: page slots · 8 ÷ context tokens, per unit
    page_slots        slots over all units that ask anything
    page_bytes        bytes of K and V of one page in one kv head
    steps             decode steps from an empty cache and after warm-up, summed over timelines
    tally             hits and accesses summed over units (page-weighted, request-weighted, token-weighted)
    truncations       blocks that the selection dropped because the execution buffer was full
    """

    cache: str
    title: str
    budget: float
    page_bytes: int
    steps: tuple[int, int]
    page_slots: int
    tally: Tally
    truncations: int
    units: dict[Unit, UnitResult] = field(default_factory=dict)

    @property
    def asking_units(self) -> int:
        """Units that ask anything: those of dense and windowed layers do not."""
        return sum(bool(unit.tally.accesses[COLD].any()) for unit in self.units.values())

    @property
    def hit_ratio(self) -> HitRatio:
        """From an empty cache."""
        return self.tally.ratio(0, COLD)

    @property
    def warm_hit_ratio(self) -> HitRatio:
        """Without each unit's first 32 steps (or the ``warm_up`` given); NaN where no step is left."""
        return self.tally.ratio(0, WARM)

    @property
    def transfer_bytes_per_step(self) -> float:
        """Missed pages in bytes, per decode step of one timeline over all its layers and heads."""
        return self._transfer(COLD)

    @property
    def warm_transfer_bytes_per_step(self) -> float:
        """Like :attr:`transfer_bytes_per_step`, after warm-up; NaN where no step is left."""
        return self._transfer(WARM)

    @property
    def partial_page_waste(self) -> float:
        """Share of the slots of accessed pages that hold no wanted token; NaN without accesses.

        For clusters this is the empty end of their last pages: of ``page_slots``, so many hold nothing.
        """
        pages, tokens = self.tally.accesses[COLD, PAGE], self.tally.accesses[COLD, TOKEN]
        return float(1 - tokens / (PAGE_TOKENS * pages)) if pages else math.nan

    def _transfer(self, phase: int) -> float:
        steps = self.steps[phase]
        return self.tally.missed_pages(0, phase) * self.page_bytes / steps if steps else math.nan

    def to_dict(self) -> dict[str, Any]:
        """One row of a curve, JSON-ready (``None`` stands for NaN)."""
        numbers = {
            "transfer_bytes_per_step": self.transfer_bytes_per_step,
            "warm_transfer_bytes_per_step": self.warm_transfer_bytes_per_step,
            "partial_page_waste": self.partial_page_waste,
        }
        return {
            "budget": self.budget,
            "page_slots": self.page_slots,
            "hit_ratio": self.hit_ratio.to_dict(),
            "warm_hit_ratio": self.warm_hit_ratio.to_dict(),
            **{name: None if math.isnan(value) else value for name, value in numbers.items()},
            "truncations": self.truncations,
        }


def simulate(
    source: AccessLog | Trace | str | Path,
    budgets: Sequence[float],
    cache: str = "wave",
    *,
    policy: Policy | Plan | str = "wave_index",
    settings: Mapping[str, Any] | None = None,
    layers: Sequence[int] | None = None,
    warm_up: int = WARM_UP_STEPS,
    keep_hits: bool = False,
    progress: Progress | None = None,
) -> list[CacheResult]:
    """Replay accesses through a block cache at each budget, every unit from an empty cache of its own.

    ``source`` is an access log, or a trace (or its folder) on which ``policy`` (with ``settings`` where it
    is given by name) first makes one. ``budgets`` are cache fractions in (0, 1]: a unit gets
    :func:`capacity_pages` slots. ``layers`` restricts both kinds of source. ``keep_hits`` keeps each
    unit's mask of page hits.

    Raises ``InputError`` for budgets outside (0, 1], unknown names, a log without units or one that cannot
    be replayed; ``TraceError`` for a bad trace.
    """
    fractions = check_budgets(budgets)
    replacement = get_cache(cache)
    if warm_up < 0:
        raise InputError(f"warm-up steps must not be negative, not {warm_up}")
    listener = progress or silent
    if isinstance(source, AccessLog):
        log = _only_layers(source, layers)
    else:
        log = _log_of_trace(source, policy, settings, layers, listener)
    if not log.units:
        raise InputError("the access log holds no units")
    truncations = sum(int(accesses.truncated.sum()) for _, accesses in log)
    results = [
        CacheResult(
            cache=replacement.name,
            title=replacement.title,
            budget=fraction,
            page_bytes=log.page_bytes,
            steps=_timeline_steps(log, warm_up),
            page_slots=0,
            tally=Tally.empty(1),
            truncations=truncations,
        )
        for fraction in fractions
    ]
    with listener.task(f"simulating {replacement.title}", len(log.units)) as step:
        for unit, accesses in log:
            accesses.check("sample {}, timeline {}, layer {}, kv head {}".format(*unit))
            replayed = _replay(accesses, fractions, replacement, warm_up, keep_hits)
            for result, at_budget in zip(results, replayed):
                result.units[unit] = at_budget
                if len(accesses.blocks):
                    result.page_slots += at_budget.capacity
                result.tally += at_budget.tally
            step.advance()
    return results


def capacity_pages(fraction: float, context_tokens: int) -> int:
    """Page slots of a unit at a cache fraction: ``round(fraction · context_tokens / 8)``, but at least 1.

    ``round`` is Python's (ties to even), as in RetroInfer's own formulas.
    """
    return max(round(fraction * context_tokens / PAGE_TOKENS), 1)


def check_budgets(budgets: Iterable[float]) -> list[float]:
    """The budgets as floats, in the order given; ``InputError`` where one lies outside (0, 1]."""
    fractions = [float(budget) for budget in budgets]
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise InputError(
                f"cache budget {fraction:g} lies outside (0, 1]",
                "a budget is the fraction of the context's pages that the cache holds, like 0.05",
            )
    if not fractions:
        raise InputError("no cache budget was given", "give at least one fraction, like 0.05")
    return fractions


def _log_of_trace(
    source: Trace | str | Path,
    policy: Policy | Plan | str,
    settings: Mapping[str, Any] | None,
    layers: Sequence[int] | None,
    progress: Progress,
) -> AccessLog:
    from kvtune.analysis.evaluate import access_log
    from kvtune.policies import get_policy
    from kvtune.traces import open_trace

    chosen = get_policy(policy, settings) if isinstance(policy, str) else policy
    trace = open_trace(source, verify=True) if isinstance(source, str | Path) else source
    wanted = list(trace.layers if layers is None else layers)
    _require_layers(wanted, trace.layers, "trace")
    return access_log(trace, chosen, layers=wanted, progress=progress)


def _only_layers(log: AccessLog, layers: Sequence[int] | None) -> AccessLog:
    if layers is None:
        return log
    _require_layers(layers, {layer for _, _, layer, _ in log.units}, "access log")
    return AccessLog(log.page_bytes, {unit: accesses for unit, accesses in log if unit[2] in layers})


def _require_layers(wanted: Iterable[int], present: Iterable[int], what: str) -> None:
    missing = sorted(set(wanted) - set(present))
    if missing:
        held = ", ".join(str(layer) for layer in sorted(set(present)))
        raise InputError(f"the {what} has no layer {missing[0]}", f"it has: {held}")


def _replay(
    accesses: UnitAccesses, fractions: list[float], cache: Cache, warm_up: int, keep_hits: bool
) -> list[UnitResult]:
    capacities = [capacity_pages(fraction, accesses.context_tokens) for fraction in fractions]
    tally = cache.tally(accesses, capacities, warm_up)
    return [
        UnitResult(
            capacity,
            Tally(tally.hits[index : index + 1], tally.accesses),
            cache.page_hits(accesses, capacity) if keep_hits else None,
        )
        for index, capacity in enumerate(capacities)
    ]


def _timeline_steps(log: AccessLog, warm_up: int) -> tuple[int, int]:
    """Decode steps of all timelines, and those after warm-up: one step passes all layers and heads."""
    longest: dict[tuple[int, int], int] = {}
    for (sample, timeline, _, _), accesses in log:
        key = (sample, timeline)
        longest[key] = max(longest.get(key, 0), accesses.steps)
    return sum(longest.values()), sum(max(steps - warm_up, 0) for steps in longest.values())
