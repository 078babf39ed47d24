"""The document of a live run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtune.analysis.statistics import bootstrap_interval
from kvtune.caching import Tally
from kvtune.geometry import ModelGeometry
from kvtune.policies.plan import Plan
from kvtune.runtime.comparison import AnswerComparison
from kvtune.runtime.engine import HeldBytes
from kvtune.runtime.measurements import CachePass, FreeAnswer, LiveRun
from kvtune.runtime.scoring import score_of, task_scores

if TYPE_CHECKING:
    from kvtune.hardware import StepCost


def live_document(
    run: LiveRun, plan: Plan, geometry: ModelGeometry, seed: int, predicted: StepCost | None
) -> dict[str, Any]:
    """The JSON document of ``kvtune live`` (see :func:`kvtune.live` for its keys)."""
    hits = run.forced.live()
    times = run.timings
    return {
        **run.engine,
        "policy": plan.policy.name,
        "params": plan.policy.parameters(),
        "dense_layers": list(plan.dense_layers),
        "windowed_layers": [layer for layer, window in enumerate(geometry.windows) if window is not None],
        "cache_fraction": run.forced.fraction,
        "interrupted": run.interrupted,
        "requests": run.requests,
        "answers": len(run.answers),
        "decode_steps": sum(len(answer.kl) for answer in run.answers),
        **quality(run.answers, seed),
        "hit_ratio": hits,
        "replayed_hit_ratio": _ratios(run.forced.replayed),
        "replay_equal": _equal(run.forced, run.free),
        "forecast_hit_ratio": {
            "forced": _forecast(run.forced),
            "free": _free_forecast(run.free, run.free_answers),
        },
        "truncations": run.forced.truncations,
        "tokens_per_second": _rate(times.steps),
        "full_tokens_per_second": _rate(times.full_steps),
        "prefill_ms": _mean_ms(run.prefill),
        "index_build_ms": _mean_ms(run.index_build),
        "step_ms": quantiles_ms(times.steps),
        "full_step_ms": quantiles_ms(times.full_steps),
        **_prediction(predicted),
        "stages_ms": {name: 1e3 * seconds / times.stage_steps for name, seconds in times.stages.items()},
        **_bytes(run),
        "score": task_scores(run.free_answers, seed),
        "per_turn": _per_turn(run, seed),
        "batch": run.batch,
    }


def quality(answers: Sequence[AnswerComparison], seed: int) -> dict[str, Any]:
    """``kl{mean, p95}``, ``delta_nll{mean, low, high}`` (nats a token) and ``top1`` over all steps."""
    kl = torch.cat([answer.kl for answer in answers]).double()
    sums = np.array([float((answer.nll_plan - answer.nll_full).sum()) for answer in answers])
    counts = np.array([len(answer.nll_full) for answer in answers])
    low, high = bootstrap_interval(sums, counts, seed=seed)
    return {
        "kl": {"mean": float(kl.mean()), "p95": float(kl.quantile(0.95))},
        "delta_nll": {
            "mean": float(sums.sum() / counts.sum()) if counts.sum() else None,
            "low": None if math.isnan(low) else low,
            "high": None if math.isnan(high) else high,
        },
        "top1": float(torch.cat([answer.top1 for answer in answers]).mean()),
    }


def _per_turn(run: LiveRun, seed: int) -> list[dict[str, Any]]:
    rows = []
    for turn in sorted({answer.turn for answer in run.answers}):
        measured = quality([answer for answer in run.answers if answer.turn == turn], seed)
        score = score_of(answer for answer in run.free_answers if answer.turn == turn)
        rows.append({"turn": turn, **measured, "score": score})
    return rows


def _ratios(tally: Tally) -> dict[str, float | None]:
    """Hit ratios by unit of counting, from an empty cache; ``None`` without accesses."""
    return tally.ratio(0).to_dict()


def _equal(forced: CachePass, free: CachePass) -> bool | None:
    return (forced.equal and free.equal) if forced.asked or free.asked else None


def _forecast(caches: CachePass) -> dict[str, Any]:
    """The forecast beside the live ratios; ``difference_points``: live minus forecast page hits, in %."""
    forecast, live = _ratios(caches.forecast), caches.live()
    known = forecast["page"] is not None and live["page"] is not None
    points = 100 * (live["page"] - forecast["page"]) if known else None  # type: ignore[operator]
    return {**forecast, "live": live, "difference_points": points}


def _free_forecast(caches: CachePass, answers: Sequence[FreeAnswer]) -> dict[str, Any] | None:
    """As :func:`_forecast`, with where the answers part; ``None`` where nothing ran free."""
    if not answers:
        return None
    places = [place for answer in answers if (place := answer.diverges_at) is not None]
    drift = {
        "answers": len(answers),
        "diverged": len(places),
        "first_token": {"median": float(np.median(places)), "min": min(places)} if places else None,
    }
    return {**_forecast(caches), "drift": drift}


def _prediction(cost: StepCost | None) -> dict[str, Any]:
    """Step and terms as the cost model says; the terms sum up to the step and what is hidden."""
    if cost is None:
        return {"predicted_step_ms": None, "predicted_terms_ms": None, "predicted_hidden_ms": None}
    terms = {name: 1e3 * term.seconds for name, term in cost.terms.items()}
    return {
        "predicted_step_ms": 1e3 * cost.seconds,
        "predicted_terms_ms": terms,
        "predicted_hidden_ms": 1e3 * cost.hidden,
    }


def _bytes(run: LiveRun) -> dict[str, Any]:
    held = run.held
    if held is None:
        return {"gpu_bytes": None, "host_bytes": None, "bytes_are": None}
    return {
        "gpu_bytes": gpu_bytes(held),
        "host_bytes": held.host,
        "bytes_are": "counted" if held.counted else "allocated",
    }


def gpu_bytes(held: HeldBytes) -> dict[str, int]:
    """What is held on the GPU by purpose, ``total``, and ``full_kv`` beside it."""
    names = ("cache", "index", "buffers", "steady", "total", "full_kv")
    return {name: getattr(held, name) for name in names}


def _rate(seconds: Sequence[float]) -> float | None:
    return len(seconds) / sum(seconds) if seconds else None


def _mean_ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * float(np.mean(seconds)) if seconds else None


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """``p50`` and ``p95`` in milliseconds; ``None`` without any."""
    if not seconds:
        return {"p50": None, "p95": None}
    p50, p95 = np.quantile(1e3 * np.asarray(seconds), [0.5, 0.95])
    return {"p50": float(p50), "p95": float(p95)}
