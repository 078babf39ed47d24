"""Task scores of free-running answers, and when they count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvtune.analysis.statistics import bootstrap_interval
from kvtune.models import LoadedModel
from kvtune.runtime.measurements import FreeAnswer
from kvtune.workloads import Turn, Workload

LEAST_ANSWERS = 100
LEAST_SCORE = 0.6
"""A score counts where full attention reaches this over so many answers."""


class Scorer:
    """Scores answers by ``workload``'s own measure; without one, or without a reference, there is none."""

    def __init__(self, loaded: LoadedModel, workload: Workload | None) -> None:
        self._loaded = loaded
        self._workload = workload

    def __call__(self, turn: Turn, tokens: Sequence[int]) -> float | None:
        """The score of an answer's ``tokens`` in [0, 1]."""
        if self._workload is None or turn.reference is None:
            return None
        text = self._loaded.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return self._workload.score(turn, text)


def task_scores(answers: Iterable[FreeAnswer], seed: int) -> dict[str, dict[str, Any]]:
    """By task, :func:`score_of` its answers, with a paired bootstrap interval of the difference."""
    by_task: dict[str, list[FreeAnswer]] = {}
    for answer in answers:
        by_task.setdefault(answer.task, []).append(answer)
    found = {}
    for task, own in by_task.items():
        score = score_of(own)
        if score is None:
            continue
        low, high = bootstrap_interval(_differences(own), seed=seed)
        found[task] = {
            **score,
            "difference": {
                "mean": float(np.mean(_differences(own))),
                "low": None if math.isnan(low) else low,
                "high": None if math.isnan(high) else high,
            },
            "note": _note(score["full"], score["n"]),
        }
    return found


def score_of(answers: Iterable[FreeAnswer]) -> dict[str, Any] | None:
    """Mean scores ``full`` and ``profile`` of the ``n`` answers that have one; ``None`` where none has."""
    scored = [(a.full_score, a.plan_score) for a in answers if a.full_score is not None]
    if not scored:
        return None
    full, plan = np.array(scored, dtype=np.float64).mean(0)
    return {"full": float(full), "profile": float(plan), "n": len(scored)}


def _differences(answers: Sequence[FreeAnswer]) -> list[float]:
    pairs = ((a.plan_score, a.full_score) for a in answers)
    return [plan - full for plan, full in pairs if plan is not None and full is not None]


def _note(full: float, n: int) -> str | None:
    """Why the score does not count; ``None`` where it does."""
    if full < LEAST_SCORE:
        few = "" if n >= LEAST_ANSWERS else f" (of {n} answers; {LEAST_ANSWERS} would tell)"
        return f"the model cannot do the task: full attention reaches {full:.0%}{few}"
    return None if n >= LEAST_ANSWERS else f"n too small: {n} answers, a score counts from {LEAST_ANSWERS} on"
