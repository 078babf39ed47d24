"""What a trial may change: the policy's parameters, how many first layers stay dense, the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtune.geometry import ModelGeometry
from kvtune.policies import all_policies, get_policy
from kvtune.policies.plan import Plan

MAX_DENSE = 2
DEFAULT_CACHE = 0.05


@dataclass(frozen=True)
class Candidate:
    """A plan with the cache it is to run with."""

    plan: Plan
    cache_fraction: float

    def params(self) -> dict[str, Any]:
        """Flat, JSON-ready: the policy's parameters, ``dense_layers``, ``cache_fraction``, ``overrides``."""
        return {
            **self.plan.policy.parameters(),
            "dense_layers": list(self.plan.dense_layers),
            "cache_fraction": self.cache_fraction,
            **(
                {"overrides": {k: dict(v) for k, v in self.plan.overrides.items()}}
                if self.plan.overrides
                else {}
            ),
        }


def shipped_default(policy: str = "wave_index") -> Candidate:
    """The method's defaults; for ``wave_index`` RetroInfer's shipped 1.8% / 23.2% / 16 / 8K, 5% cache."""
    return Candidate(Plan(get_policy(policy)), DEFAULT_CACHE)


def suggest(
    trial: Any,
    policy: str,
    geometry: ModelGeometry,
    context_length: int,
    fixed: Mapping[str, Any] | None = None,
) -> Candidate:
    """The candidate of an Optuna trial; ``fixed`` parameters are what they are, whatever it suggests."""
    parameters = all_policies()[policy].search_space(trial, geometry, context_length) | dict(fixed or {})
    dense = trial.suggest_int("first_dense_layers", 0, min(MAX_DENSE, geometry.n_layers - 1))
    cache = trial.suggest_float("cache_fraction", 0.01, 0.5, log=True)
    return Candidate(Plan(get_policy(policy, parameters), dense_layers=tuple(range(dense))), cache)


def starting_points(policy: str) -> list[dict[str, Any]]:
    """Trials worth running first: the shipped defaults, and other splits of about the same bytes."""
    base = {"first_dense_layers": 0, "cache_fraction": DEFAULT_CACHE}
    if policy != "wave_index":
        return [base]
    default = get_policy(policy).parameters()
    searched = (
        "retrieval", "estimation", "tokens_per_centroid", "segment", "sink", "local", "spread_correction",
    )  # fmt: skip
    shipped = {**base, **{name: default[name] for name in searched}}
    corrected = {**shipped, "tokens_per_centroid": 32, "spread_correction": 0.6}
    finer = {**shipped, "tokens_per_centroid": 8, "retrieval": 0.012, "estimation": 0.1}
    coarser = {**shipped, "tokens_per_centroid": 32, "retrieval": 0.03, "estimation": 0.6, "local": 32}
    narrower = {**shipped, "retrieval": 0.03, "local": 16}
    return [shipped, corrected, finer, coarser, narrower]
