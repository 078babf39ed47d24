"""Settings of one layer to measure for per-layer budgets: a coarse ladder, and the neighbours of a rung."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvtune.policies.base import Policy
from kvtune.policies.wave_index import WaveIndex

Setting = dict[str, Any]
"""Parameters that a layer changes."""

BUDGET_STEPS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0, 8.0)
RETRIEVAL_STEPS = (0.35, 0.7, 1.0, 1.4, 2.8, 5.6)
CLUSTER_TOKENS = (16, 32, 64)

WAVE = ("tokens_per_centroid", "local", "retrieval", "estimation", "spread_correction")
"""What a rung of the wave index sets."""
FINER = 1.2
NEAR_CLUSTER_TOKENS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NEAR_LOCAL = (8, 16, 32, 64, 128, 256)
NEAR_ESTIMATION = 0.15
NEAR_SPREAD = 0.15


def ladder(policy: Policy) -> list[Setting]:
    """Settings to try in each layer: multiples of the policy's budget.

    For the wave index also how the bytes are split: cluster size (few large clusters are cheap to scan, many
    small ones precise) and the share estimated (the policy's, or all the rest).
    """
    if not isinstance(policy, WaveIndex):
        return _budgets(policy, [step * _budget(policy) for step in BUDGET_STEPS]) or [{}]
    here = {name: getattr(policy, name) for name in WAVE}
    return _distinct(
        _wave(here, tokens_per_centroid=tokens, retrieval=policy.retrieval * step, estimation=estimation)
        for tokens in {*CLUSTER_TOKENS, policy.tokens_per_centroid}
        for step in RETRIEVAL_STEPS
        for estimation in (policy.estimation, 1.0)
    )


def neighbours(
    policy: Policy, setting: Mapping[str, Any], context: int, retrievals: Iterable[float] = ()
) -> list[Setting]:
    """Settings a small step away from ``setting``, one parameter changed in each.

    For the wave index: retrieval (by at least one cluster of a prompt of ``context`` tokens), estimation,
    spread correction, cluster size at the same share retrieved, and the local window; where the kv heads of
    a layer have budgets of their own, all that from each of their ``retrievals``. For others: the budget.
    """
    if isinstance(policy, WaveIndex):
        here = {name: setting.get(name, getattr(policy, name)) for name in WAVE}
        starts = [here | {"retrieval": share} for share in retrievals] or [here]
        return _distinct(near for start in starts for near in _wave_neighbours(start, context))
    here = policy.parameters() | dict(setting)
    budget = here.get(policy.budget or "", 0)
    least = 1 if isinstance(budget, int) else 0
    near = [min(budget / FINER, budget - least), max(budget * FINER, budget + least)]
    return [found for found in _budgets(policy, near) if found != setting]


def _wave_neighbours(here: Setting, context: int) -> Iterator[Setting]:
    tokens, local, retrieval, estimation, spread = (here[name] for name in WAVE)
    cluster = tokens / max(context, tokens)
    at_least = max(retrieval, cluster)  # a smaller share retrieves one cluster, too
    found = [
        _wave(here, retrieval=max(min(retrieval / FINER, retrieval - cluster), cluster)),
        _wave(here, retrieval=max(at_least * FINER, at_least + cluster)),
        *(
            _wave(here, estimation=max(estimation + step, 0.0))
            for step in (-NEAR_ESTIMATION, NEAR_ESTIMATION)
        ),
        *(_wave(here, spread_correction=max(spread + step, 0.0)) for step in (-NEAR_SPREAD, NEAR_SPREAD)),
        *(_wave(here, tokens_per_centroid=other) for other in _beside(NEAR_CLUSTER_TOKENS, tokens)),
        *(_wave(here, local=other) for other in _beside(NEAR_LOCAL, local)),
    ]
    return (near for near in found if near != here)


def _wave(here: Setting, **changed: float) -> Setting:
    """``here`` with something changed. Where both shares exceed 1 together, all the rest is estimated."""
    found = here | changed
    for share in ("retrieval", "estimation"):
        found[share] = min(found[share], 1.0)
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}


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
