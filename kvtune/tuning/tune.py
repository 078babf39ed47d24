"""``tune``: search a policy's settings on recorded traces and check the choice on samples held out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from optuna.trial import FixedTrial, FrozenTrial

from kvtune.analysis.statistics import bootstrap_interval
from kvtune.errors import Infeasible, InputError, unknown
from kvtune.policies import all_policies, get_policy
from kvtune.progress import Progress, silent
from kvtune.traces import Trace, open_trace
from kvtune.tuning.allocation import allocate
from kvtune.tuning.bench import Bench, Interval, Score
from kvtune.tuning.space import Candidate, shipped_default, starting_points, suggest
from kvtune.tuning.study import Constraints, completed, counts, open_study, pareto, run_trials, violation

JOURNAL = "study.journal"
MARGIN = 0.99
"""Per-layer budgets aim at this share of the byte cap: held-out prompts differ a little in length."""


@dataclass(frozen=True)
class TuneResult:
    """What a study found.

    ``document`` is JSON-ready (keys of ``kvtune tune``, without ``profile``); scores carry the evidence for
    the profile. ``winner`` compares mean errors on held-out samples at no more read bytes.
    """

    chosen: Candidate
    default: Candidate
    search: dict[str, Score]
    held_out: dict[str, Score]
    difference: dict[str, float]
    winner: str
    intervals: dict[str, Interval]
    trials: int
    context_tokens: tuple[int, int]
    search_samples: tuple[int, ...]
    held_out_samples: tuple[int, ...]
    document: dict[str, Any]


def tune(
    trace: Trace | str | Path,
    out: Path,
    *,
    policy: str = "wave_index",
    trials: int = 40,
    constraints: Constraints | None = None,
    held_out: float = 0.34,
    layers: Sequence[int] | None = None,
    per_layer: bool = True,
    fixed: Mapping[str, Any] | None = None,
    device: str = "cpu",
    seed: int = 0,
    progress: Progress | None = None,
) -> TuneResult:
    """Search ``policy`` on most samples of ``trace``, choose, and measure the choice on the others.

    The choice is the feasible setting of least mean output error that reads no more than the cap:
    ``constraints.max_read_bytes``, else what the shipped default reads (with ``max_error`` alone: the
    setting of fewest read bytes that respects it). With ``per_layer`` the budget is then spread over the
    layers at the same bytes, and kept if it lowers the error on the search samples. ``fixed`` parameters are
    held at their values throughout (``{"spread_correction": 0, "head_shares": ""}``: what RetroInfer has);
    the default that the choice is compared with is the shipped one all the same. The last samples
    (``held_out`` of them, at least one) take no part in any of this.

    The study lives in ``out/study.journal``; ``trials`` is the total over all resumes.

    Raises ``InputError`` for bad counts, names or a trace with fewer than two samples; ``Infeasible`` where
    no trial respects the constraints.
    """
    if isinstance(trace, str | Path):
        trace = open_trace(trace, verify=True)
    limits = constraints or Constraints()
    search, rest = split(trace, held_out)
    if trials < 1:
        raise InputError(f"--trials must be at least 1, not {trials}")
    if policy not in all_policies():
        raise unknown("policy", policy, all_policies())
    chosen_layers = list(trace.layers) if layers is None else list(layers)
    bench = Bench(trace, search, chosen_layers, device)
    default = shipped_default(policy)
    listener = progress or silent
    with listener.task("shipped default", None):
        default_score = bench.score(default.plan, default.cache_fraction)
    cap = _byte_cap(limits, default_score)
    limits = Constraints(limits.max_error, cap, limits.min_hit_ratio)
    out.mkdir(parents=True, exist_ok=True)
    constant = dict(fixed or {})
    get_policy(policy, constant)  # refuse what does not exist before anything is measured
    identity = {**_identity(trace, policy, search, chosen_layers, limits, seed), "fixed": constant}
    study = open_study(out / JOURNAL, policy, seed, starting_points(policy), identity)
    context = bench.context_tokens[1]

    def measure(candidate: Candidate, early: Callable[[float], None]) -> Score:
        early(bench.first_bytes(candidate.plan))
        return bench.score(candidate.plan, candidate.cache_fraction)

    def propose(trial: Any) -> Candidate:
        return suggest(trial, policy, trace.geometry, context, constant)

    run_trials(study, trials, propose, measure, limits, listener)
    best = _choose(completed(study), limits)
    candidate = propose(FixedTrial(best.params))
    score = bench.score(candidate.plan, candidate.cache_fraction)
    if per_layer:
        candidate, score = _spread(bench, candidate, score, limits, constant, listener)
    with listener.task("held-out check", 2) as task:
        judge = Bench(trace, rest, chosen_layers, device)
        held = judge.score(candidate.plan, candidate.cache_fraction)
        task.advance()
        held_default = judge.score(default.plan, default.cache_fraction)
    difference, winner = verdict(held, held_default)
    result = TuneResult(
        chosen=candidate,
        default=default,
        search={"chosen": score, "default": default_score},
        held_out={"chosen": held, "default": held_default},
        difference=difference,
        winner=winner,
        intervals=bench.intervals(candidate.plan, candidate.cache_fraction, seed),
        trials=counts(study)["complete"],
        context_tokens=bench.context_tokens,
        search_samples=search,
        held_out_samples=rest,
        document={},
    )
    front = [(propose(FixedTrial(t.params)), t.user_attrs["score"]) for t in pareto(completed(study))]
    result.document.update(_document(result, front, counts(study)))
    return result


def split(trace: Trace, held_out: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sample numbers for the search and for the held-out check (the last ones, at least one)."""
    if not 0 < held_out < 1:
        raise InputError(f"--held-out must lie between 0 and 1, not {held_out:g}")
    if trace.n_samples < 2:
        raise InputError(
            f"tuning needs at least 2 samples, the trace has {trace.n_samples}",
            "one part is searched, the other held out: capture with --samples 4 or more",
        )
    rest = min(max(1, round(trace.n_samples * held_out)), trace.n_samples - 1)
    numbers = tuple(range(trace.n_samples))
    return numbers[:-rest], numbers[-rest:]


def verdict(chosen: Score, default: Score) -> tuple[dict[str, float], str]:
    """The paired difference of mean errors (chosen − default) with its interval, and who wins.

    Pairs are (timeline, layer). A choice that reads more bytes than the default cannot win; an interval
    that holds 0 is a tie.
    """
    differences = np.subtract(chosen.unit_errors, default.unit_errors)
    low, high = bootstrap_interval(differences)
    mean = float(differences.mean())
    low, high = (mean, mean) if math.isnan(low) else (min(low, mean), max(high, mean))
    winner = "tie"
    if high < 0 and chosen.read_bytes_per_step <= default.read_bytes_per_step:
        winner = "chosen"
    elif low > 0:
        winner = "default"
    return {"value": mean, "low": low, "high": high}, winner


def _byte_cap(limits: Constraints, default: Score) -> float | None:
    if limits.max_read_bytes is not None:
        return limits.max_read_bytes
    return None if limits.max_error is not None else default.read_bytes_per_step


def _identity(
    trace: Trace, policy: str, samples: Sequence[int], layers: Sequence[int], limits: Constraints, seed: int
) -> dict[str, Any]:
    """What the trials of a study depend on; the manifest's digest stands for the trace."""
    digest = hashlib.sha256((trace.path / "manifest.json").read_bytes()).hexdigest()[:16]
    return {
        "trace": digest,
        "policy": policy,
        "searched": sorted(starting_points(policy)[0]),
        "samples": list(samples),
        "layers": list(layers),
        "constraints": asdict(limits),
        "seed": seed,
    }


def _choose(trials: list[FrozenTrial], limits: Constraints) -> FrozenTrial:
    """The feasible trial of least error; of fewest bytes where only the error is limited."""
    feasible = [t for t in trials if violation(t) <= 0]
    if not feasible:
        nearest = min(trials, key=violation, default=None)
        hint = "run more --trials or loosen a constraint"
        if nearest is not None:
            error, read = nearest.values
            hint += f"; the nearest trial has error {error:.3g} at {read / 1e6:.3g} MB a step"
        raise Infeasible(f"none of {len(trials)} trials satisfies the constraints", hint)
    by_bytes = limits.max_error is not None and limits.max_read_bytes is None
    return min(feasible, key=lambda t: t.values[::-1] if by_bytes else t.values)


def _spread(
    bench: Bench,
    candidate: Candidate,
    score: Score,
    limits: Constraints,
    fixed: Collection[str],
    progress: Progress,
) -> tuple[Candidate, Score]:
    """Per-layer budgets at the candidate's bytes (or up to the cap), kept if they lower the error."""
    cap = MARGIN * (limits.max_read_bytes or score.read_bytes_per_step)
    plan = allocate(bench, candidate.plan, cap, progress, fixed=fixed)
    if plan is None:
        return candidate, score
    spread = replace(candidate, plan=plan)
    spread_score = bench.score(plan, candidate.cache_fraction)
    better = spread_score.error_mean < score.error_mean and limits.met(spread_score)
    return (spread, spread_score) if better else (candidate, score)


def _document(
    result: TuneResult, front: list[tuple[Candidate, dict[str, Any]]], trials: dict[str, int]
) -> dict[str, Any]:
    def row(candidate: Candidate, score: Score) -> dict[str, Any]:
        return {"params": candidate.params(), **score.to_dict()}

    return {
        "pareto": [{"params": candidate.params(), **score} for candidate, score in front],
        "chosen": row(result.chosen, result.search["chosen"]),
        "default": row(result.default, result.search["default"]),
        "held_out": {
            "samples": list(result.held_out_samples),
            "chosen": row(result.chosen, result.held_out["chosen"]),
            "default": row(result.default, result.held_out["default"]),
            "difference": result.difference,
            "winner": result.winner,
        },
        "trials": trials,
    }
