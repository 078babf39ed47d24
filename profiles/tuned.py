"""The profile that a tuning run amounts to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvtune import __version__
from kvtune.analysis.statistics import LEVEL, bootstrap_interval
from kvtune.policies import Policy
from kvtune.profiles.io import parse_profile
from kvtune.profiles.schema import Profile
from kvtune.traces import Trace
from kvtune.tuning import TuneResult


def from_tuning(result: TuneResult, trace: Trace, seed: int, layers: Sequence[int] | None = None) -> Profile:
    """What ``tune`` found on ``trace``, as a profile.

    A policy's budget that is a count of tokens is stored per token of context, so that the profile scales;
    other parameters are stored as they are. Intervals are bootstrapped over (timeline, layer) for the mean
    error and over timelines for the bytes. ``layers`` are those measured (``None``: all of the trace).
    """
    measured = list(trace.layers if layers is None else layers)
    score, plan = result.search["chosen"], result.chosen.plan
    low, high = result.context_tokens
    every = measured == list(range(trace.geometry.n_layers))
    data = {
        "kvtune_profile": 1,
        "model": {"id": trace.model, "fingerprint": trace.fingerprint, "rope": _rope(trace)},
        "geometry": trace.geometry.to_dict(),
        "context_length": {"min": low, "max": high},
        "policy": {
            "name": plan.policy.name,
            "parameters": _scaled(plan.policy, plan.policy.parameters(), high),
        },
        "overrides": {
            layer: _scaled(plan.policy, own, high) for layer, own in sorted(plan.overrides.items())
        },
        "dense_layers": list(plan.dense_layers),
        "cache": {"policy": "wave", "fraction": result.chosen.cache_fraction},
        "workload": _workload(trace),
        "predicted": {
            "level": LEVEL,
            "layers": None if every else measured,
            "output_error": {
                "mean": _interval(score.error_mean, score.unit_errors),
                "p95": {"value": score.error_p95},
            },
            "read_bytes_per_step": _interval(score.read_bytes_per_step, score.timeline_bytes),
            "hit_ratio": None if score.hit_ratio is None else {"value": score.hit_ratio},
        },
        "held_out": {
            "samples": len(result.held_out_samples),
            "chosen": result.held_out["chosen"].to_dict(),
            "default": {"parameters": result.default.params(), **result.held_out["default"].to_dict()},
            "winner": result.winner,
            "difference": result.difference,
        },
        "provenance": {
            "kvtune": __version__,
            "trace": trace.path.name,
            "seed": seed,
            "trials": result.trials,
        },
    }
    return parse_profile(data, "the tuned profile")


def _scaled(policy: Policy, parameters: Mapping[str, Any], context: int) -> dict[str, Any]:
    """``parameters`` with a budget in tokens as a function of the context, exact at ``context`` tokens."""
    count = parameters.get(policy.budget or "")
    if isinstance(count, bool) or not isinstance(count, int):
        return dict(parameters)
    return {**parameters, str(policy.budget): {"per_token": count / context}}


def _interval(value: float, units: Sequence[float]) -> dict[str, float]:
    low, high = bootstrap_interval(units)
    if math.isnan(low):
        return {"value": value}
    return {"value": value, "low": min(low, value), "high": max(high, value)}


def _rope(trace: Trace) -> dict[str, Any] | None:
    """The override that the capture recorded; a model's own rope needs no mention."""
    recorded = trace.manifest.get("rope") or {}
    if not recorded.get("override"):
        return None
    return {"override": recorded["override"], "length": recorded.get("length")}


def _workload(trace: Trace) -> dict[str, Any]:
    """The capture's own description, and what the samples turned out to hold."""
    described = dict(trace.manifest.get("workload") or {})
    records = trace.samples
    return {
        "task": str(described.pop("task", "prompts")),
        "samples": trace.n_samples,
        "requests": 1 + max((record.request for record in records), default=0),
        "turns": 1 + max((record.turn for record in records), default=0),
        "settings": described,
    }
