"""Settings of one layer to measure for per-layer budgets: a coarse ladder, and the neighbours of a rung."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvtune.policies.base import Policy
from kvtune.policies.wave_index import WaveIndex

Setting = dict[str, Any]
"""Parameters that a layer changes."""

BUDGET_STEPS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0, 8.0)
RETRIEVAL_STEPS = (0.35, 0.7, 1.0, 1.4, 2.8, 5.6)
CLUSTER_TOKENS = (16, 32, 64)

FINER = 1.2
NEAR_CLUSTER_TOKENS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NEAR_LOCAL = (8, 16, 32, 64, 128, 256)
NEAR_ESTIMATION = 0.15


def ladder(policy: Policy) -> list[Setting]:
    """Settings to try in each layer: multiples of the policy's budget.

    For the wave index also how the bytes are split: cluster size (few large clusters are cheap to scan, many
    small ones precise) and the share estimated (the policy's, or all the rest).
    """
    if not isinstance(policy, WaveIndex):
        return _budgets(policy, [step * _budget(policy) for step in BUDGET_STEPS]) or [{}]
    return _distinct(
        _wave(tokens, policy.local, policy.retrieval * step, estimation)
        for tokens in {*CLUSTER_TOKENS, policy.tokens_per_centroid}
        for step in RETRIEVAL_STEPS
        for estimation in (policy.estimation, 1.0)
    )


def neighbours(policy: Policy, setting: Mapping[str, Any], context: int) -> list[Setting]:
    """Settings a small step away from ``setting``, one parameter changed in each.

    For the wave index: retrieval (by at least one cluster of a prompt of ``context`` tokens), estimation,
    cluster size at the same share retrieved, and the local window. For others: the budget.
    """
    here = policy.parameters() | dict(setting)
    if not isinstance(policy, WaveIndex):
        budget = here.get(policy.budget or "", 0)
        least = 1 if isinstance(budget, int) else 0
        near = [min(budget / FINER, budget - least), max(budget * FINER, budget + least)]
        return [found for found in _budgets(policy, near) if found != setting]
    tokens, local = here["tokens_per_centroid"], here["local"]
    retrieval, estimation = here["retrieval"], here["estimation"]
    cluster = tokens / max(context, tokens)
    at_least = max(retrieval, cluster)  # a smaller share retrieves one cluster, too
    found = [
        _wave(tokens, local, max(min(retrieval / FINER, retrieval - cluster), cluster), estimation),
        _wave(tokens, local, max(at_least * FINER, at_least + cluster), estimation),
        _wave(tokens, local, retrieval, max(estimation - NEAR_ESTIMATION, 0.0)),
        _wave(tokens, local, retrieval, estimation + NEAR_ESTIMATION),
        *(_wave(other, local, retrieval, estimation) for other in _beside(NEAR_CLUSTER_TOKENS, tokens)),
        *(_wave(tokens, other, retrieval, estimation) for other in _beside(NEAR_LOCAL, local)),
    ]
    return [near for near in _distinct(found) if near != setting]


def _wave(tokens: int, local: int, retrieval: float, estimation: float) -> Setting:
    """One way to split a layer's bytes; both zones together hold at most all clusters."""
    retrieval = round(min(retrieval, 1.0), 6)
    return {
        "tokens_per_centroid": tokens,
        "local": local,
        "retrieval": retrieval,
        "estimation": round(min(estimation, 1.0 - retrieval), 6),
    }


def _budget(policy: Policy) -> float:
    return getattr(policy, policy.budget) if policy.budget else 0


def _budgets(policy: Policy, values: Iterable[float]) -> list[Setting]:
    """The policy's budget at each value, a count of at least 1 or a share of at most 1; none without one."""
    if policy.budget is None:
        return []
    counts = isinstance(_budget(policy), int)
    return _distinct(
        {policy.budget: max(int(value), 1) if counts else round(min(value, 1.0), 6)} for value in values
    )


def _beside(values: Sequence[int], value: int) -> list[int]:
    """The next smaller and the next larger of ascending ``values``."""
    below, above = [v for v in values if v < value], [v for v in values if v > value]
    return [*below[-1:], *above[:1]]


def _distinct(settings: Iterable[Setting]) -> list[Setting]:
    """Each setting once, ordered by its values: those of one cluster size together, which share an index."""
    return [dict(pairs) for pairs in sorted({tuple(setting.items()) for setting in settings})]
