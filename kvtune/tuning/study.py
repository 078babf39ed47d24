"""The search: an Optuna study over candidates, resumable, with constraints, in a journal file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from kvtune.errors import InputError
from kvtune.progress import Progress, silent
from kvtune.tuning.bench import Score
from kvtune.tuning.space import Candidate

HOPELESS = 3.0
"""A trial that reads more than this multiple of the cap on its first timeline is pruned."""


@dataclass(frozen=True)
class Constraints:
    """Limits that a setting must respect; ``None`` means no limit."""

    max_error: float | None = None
    max_read_bytes: float | None = None
    min_hit_ratio: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--max-error", self.max_error), ("--max-read-bytes", self.max_read_bytes)):
            if value is not None and not value > 0:
                raise InputError(f"{name} must be above 0, not {value:g}")
        if self.min_hit_ratio is not None and not 0 <= self.min_hit_ratio <= 1:
            raise InputError(f"--min-hit-ratio must lie in [0, 1], not {self.min_hit_ratio:g}")

    def violations(self, score: Score) -> dict[str, float]:
        """Relative excess over each limit: ≤ 0 where it is respected (Optuna's convention)."""
        limits = {}
        if self.max_error is not None:
            limits["max_error"] = score.error_mean / self.max_error - 1
        if self.max_read_bytes is not None:
            limits["max_read_bytes"] = score.read_bytes_per_step / self.max_read_bytes - 1
        if self.min_hit_ratio is not None:
            reached = 1.0 if score.hit_ratio is None else score.hit_ratio
            limits["min_hit_ratio"] = self.min_hit_ratio - reached
        return limits

    def met(self, score: Score) -> bool:
        """Whether every limit is respected."""
        return all(v <= 0 for v in self.violations(score).values())


def open_study(
    journal: Path, name: str, seed: int, starts: list[dict[str, Any]], identity: dict[str, Any]
) -> optuna.Study:
    """The study in ``journal``, created or continued.

    ``identity`` is what the trials depend on (trace, samples, layers, policy …): continuing with another is
    an ``InputError``. A journal is appended under a file lock, so several processes may share it.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = JournalStorage(JournalFileBackend(str(journal)))
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=8)
    study = optuna.create_study(
        storage=storage,
        study_name=name,
        sampler=sampler,
        directions=["minimize", "minimize"],
        load_if_exists=True,
    )
    text = json.dumps(identity, sort_keys=True)
    known = study.user_attrs.get("identity")
    if known is None:
        study.set_user_attr("identity", text)
        for start in starts:
            study.enqueue_trial(start)
    elif known != text:
        old, new = json.loads(known), json.loads(text)
        key = next(k for k in sorted({*old, *new}) if old.get(k) != new.get(k))
        raise InputError(
            f"the study in '{journal}' was begun with {key} {old.get(key)}, not {new.get(key)}",
            "choose another --out, or --overwrite to begin anew",
        )
    return study


def run_trials(
    study: optuna.Study,
    total: int,
    suggest: Callable[[Trial], Candidate],
    measure: Callable[[Candidate, Callable[[float], None]], Score],
    constraints: Constraints,
    progress: Progress | None = None,
) -> None:
    """Run until ``total`` trials have finished, counting those of earlier runs.

    ``measure(candidate, early)`` calls ``early(bytes)`` with the first timeline's read bytes.
    """
    done = sum(t.state.is_finished() for t in study.get_trials(deepcopy=False))

    def objective(trial: Trial) -> tuple[float, float]:
        def early(read_bytes: float) -> None:
            cap = constraints.max_read_bytes
            if cap is not None and read_bytes > HOPELESS * cap and trial.number > 1:
                raise optuna.TrialPruned

        try:
            score = measure(suggest(trial), early)
        except InputError as error:  # the policy refuses this combination on this trace
            trial.set_user_attr("refused", error.message)
            raise optuna.TrialPruned from error
        trial.set_user_attr("score", score.to_dict())
        for name, violation in constraints.violations(score).items():
            trial.set_constraint(name, violation)
        return score.error_mean, score.read_bytes_per_step

    with (progress or silent).task("trials", total) as task:
        task.advance(min(done, total))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if total > done:
                study.optimize(objective, n_trials=total - done, callbacks=[lambda *_: task.advance()])


def counts(study: optuna.Study) -> dict[str, int]:
    """Finished trials by outcome: ``complete``, ``pruned``, ``failed``."""
    states = [t.state for t in study.get_trials(deepcopy=False)]
    return {
        "complete": states.count(TrialState.COMPLETE),
        "pruned": states.count(TrialState.PRUNED),
        "failed": states.count(TrialState.FAIL),
    }


def completed(study: optuna.Study) -> list[FrozenTrial]:
    """Trials with a score, in order."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def violation(trial: FrozenTrial) -> float:
    """The worst relative excess of a trial over its limits; 0 or less where it is feasible."""
    return max(trial.constraints.values(), default=0.0)


def pareto(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """Trials that no other beats in both error and bytes, by ascending bytes."""
    front: list[FrozenTrial] = []
    for trial in sorted(trials, key=lambda t: (t.values[1], t.values[0])):
        if not front or trial.values[0] < front[-1].values[0]:
            front.append(trial)
    return front
