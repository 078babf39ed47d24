"""A profile from what a tuning study found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtune import __version__
from kvtune.policies import Policy
from kvtune.profiles.io import parse_profile
from kvtune.profiles.schema import Profile
from kvtune.traces import Trace
from kvtune.tuning import TuneResult


def profile_of(result: TuneResult, trace: Trace, seed: int) -> Profile:
    """The chosen setting of ``result``, its predictions and its held-out check, ready to be saved.

    A policy's budget that is a count of tokens is stored per token of context, so that the profile scales;
    other parameters are stored as they are.
    """
    plan = result.chosen.plan
    shortest, longest = result.context_tokens
    data: dict[str, Any] = {
        "kvtune_profile": 1,
        "model": {"id": trace.model, "fingerprint": trace.fingerprint, "rope": _rope(trace)},
        "geometry": trace.geometry.to_dict(),
        "context_length": {"min": shortest, "max": longest},
        "policy": {
            "name": plan.policy.name,
            "parameters": _scaled(plan.policy, plan.policy.parameters(), longest),
        },
        "overrides": {
            layer: _scaled(plan.policy, own, longest) for layer, own in sorted(plan.overrides.items())
        },
        "dense_layers": list(plan.dense_layers),
        "cache": _cache(result),
        "workload": _workload(trace),
        "predicted": _predicted(result, trace),
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


def _cache(result: TuneResult) -> dict[str, Any] | None:
    """The cache that was simulated, where the policy asks anything of one."""
    if result.search["chosen"].hit_ratio is None:
        return None
    return {"policy": "wave", "fraction": result.chosen.cache_fraction}


def _predicted(result: TuneResult, trace: Trace) -> dict[str, Any]:
    def interval(name: str) -> dict[str, float]:
        return dict(zip(("value", "low", "high"), result.intervals[name], strict=True))

    every = len(trace.layers) == trace.geometry.n_layers
    predicted: dict[str, Any] = {
        "layers": None if every else list(trace.layers),
        "output_error": {"mean": interval("error_mean"), "p95": interval("error_p95")},
        "read_bytes_per_step": interval("read_bytes_per_step"),
    }
    if "hit_ratio" in result.intervals:
        predicted["hit_ratio"] = interval("hit_ratio")
    return predicted


def _rope(trace: Trace) -> dict[str, Any] | None:
    """The override that the capture recorded; a model's own rope needs no mention."""
    recorded = trace.manifest.get("rope") or {}
    if not recorded.get("override"):
        return None
    return {"override": recorded["override"], "length": recorded.get("length")}


def _workload(trace: Trace) -> dict[str, Any]:
    """What the samples hold, and the capture's own description of it."""
    records = trace.samples
    segments = [segment for sample in range(trace.n_samples) for segment in trace.segments(sample)]
    return {
        "task": ", ".join(sorted({record.task for record in records})),
        "samples": trace.n_samples,
        "requests": 1 + max(record.request for record in records),
        "turns": 1 + max(record.turn for record in records),
        "decode_steps": max((s.length for s in segments if s.kind == "generated"), default=0),
        "settings": dict(trace.manifest.get("workload") or {}),
    }
