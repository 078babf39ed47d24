"""A profile from what a tuning study found."""

from __future__ import annotations

import json
from typing import Any

from kvtune import __version__
from kvtune.profiles.io import parse_profile
from kvtune.profiles.schema import Profile
from kvtune.traces import Trace
from kvtune.tuning import Candidate, Score, TuneResult


def profile_of(result: TuneResult, trace: Trace, seed: int) -> Profile:
    """The chosen setting of ``result``, its predictions and its held-out check, ready to be saved."""
    plan = result.chosen.plan
    shortest, longest = result.context_tokens
    data: dict[str, Any] = {
        "kvtune_profile": 1,
        "model": {"id": trace.model, "fingerprint": trace.fingerprint},
        "geometry": trace.geometry.to_dict(),
        "context_length": {"min": shortest, "max": longest},
        "policy": {"name": plan.policy.name, "parameters": plan.policy.parameters()},
        "overrides": {str(layer): dict(own) for layer, own in plan.overrides.items()},
        "dense_layers": list(plan.dense_layers),
        "cache": {"policy": "wave", "fraction": result.chosen.cache_fraction},
        "workload": _workload(trace),
        "predicted": _predicted(result),
        "held_out": {
            "samples": len(result.held_out_samples),
            "chosen": _measured(result.chosen, result.held_out["chosen"]),
            "default": _measured(result.default, result.held_out["default"]),
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
    return parse_profile(json.loads(json.dumps(data)), "the tuned profile")


def _workload(trace: Trace) -> dict[str, Any]:
    records = trace.samples
    return {
        "task": ", ".join(sorted({record.task for record in records})),
        "samples": trace.n_samples,
        "requests": 1 + max(record.request for record in records),
        "turns": 1 + max(record.turn for record in records),
    }


def _predicted(result: TuneResult) -> dict[str, Any]:
    def interval(name: str) -> dict[str, float]:
        return dict(zip(("value", "low", "high"), result.intervals[name]))

    predicted = {
        "output_error": {"mean": interval("error_mean"), "p95": interval("error_p95")},
        "read_bytes_per_step": interval("read_bytes_per_step"),
    }
    if "hit_ratio" in result.intervals:
        predicted["hit_ratio"] = interval("hit_ratio")
    return predicted


def _measured(candidate: Candidate, score: Score) -> dict[str, Any]:
    return {"parameters": candidate.params(), **score.to_dict()}
