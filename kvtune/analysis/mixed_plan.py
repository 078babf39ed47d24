"""Mixed precision: which heads should stay native, and which precision should serve the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvtune.errors import InputError
from kvtune.quantisation import HeadPrecision, PrecisionPlan

Head = tuple[int, int]
"""(layer, kv head)."""
NATIVE_SHARE = 0.10
"""Share of heads that stay native by default (articles report that a tenth regains what 4 bits lose)."""
MAX_ERROR = 0.10
"""The mean output error up to which a plan is proposed for its bytes."""


def check_plan_options(native_share: float, target_drop: float | None) -> None:
    """Shares lie in [0, 1]; ``InputError`` where they do not."""
    for name, share in (("native share", native_share), ("target drop", target_drop)):
        if share is not None and not 0 <= share <= 1:
            raise InputError(f"the {name} must lie between 0 and 1, not {share}")


def native_heads(
    errors: Mapping[Head, float], native_share: float = NATIVE_SHARE, target_drop: float | None = None
) -> list[Head]:
    """The heads that stay native, the most sensitive first; ties by layer and head.

    With ``target_drop``, the fewest heads whose errors sum to that share of the total, so that the mean
    error drops by it; else ``native_share`` of the heads, rounded up. Under full attention a native head's
    error is 0 and heads do not influence each other, so no other choice of as many heads is better.
    """
    ranked = sorted(errors, key=lambda head: (-errors[head], head))
    if target_drop is None:
        # Not one head more where the product is a hair above a whole number.
        return ranked[: math.ceil(native_share * len(ranked) - 1e-9)]
    wanted, found = target_drop * math.fsum(errors.values()), 0.0
    for count, head in enumerate(ranked):
        if found >= wanted * (1 - 1e-12):
            return ranked[:count]
        found += errors[head]
    return ranked


def mixed_plan(
    precision: str, errors: Mapping[Head, float], kept: Sequence[Head], native: float, coded: float
) -> dict[str, Any]:
    """A plan that holds all heads in ``precision`` but for ``kept``, as plain data.

    ``errors``: mean output error of every head in that precision; ``native`` and ``coded``: bytes of one
    token's key and value in one head.
    """
    uniform = math.fsum(errors.values()) / len(errors)
    stays = set(kept)
    mixed = math.fsum(error for head, error in errors.items() if head not in stays) / len(errors)
    share = len(kept) / len(errors)
    return {
        "precision": precision,
        "native_heads": [{"layer": layer, "kv_head": head} for layer, head in kept],
        "native_share": share,
        "output_error": {"uniform": uniform, "mixed": mixed},
        "drop": 1 - mixed / uniform if uniform else 0.0,
        "bytes_per_token": {
            "native": native,
            "uniform": coded,
            "mixed": share * native + (1 - share) * coded,
        },
    }


def propose(plans: Sequence[Mapping[str, Any]], max_error: float = MAX_ERROR) -> dict[str, Any]:
    """The plan with the fewest bytes whose mixed error is at most ``max_error``; the others are alternatives.

    If there is none, it is the plan with the least error, and ``within_max_error`` is false.
    """
    within = [plan for plan in plans if plan["output_error"]["mixed"] <= max_error]
    best = (
        min(within, key=lambda plan: (plan["bytes_per_token"]["mixed"], plan["output_error"]["mixed"]))
        if within
        else min(plans, key=lambda plan: plan["output_error"]["mixed"])
    )
    return {
        **best,
        "max_error": max_error,
        "within_max_error": bool(within),
        "alternatives": [dict(plan) for plan in plans if plan is not best],
    }


def plan_precisions(plan: Mapping[str, Any]) -> PrecisionPlan:
    """A plan of :func:`mixed_plan` as what :func:`kvtune.analysis.evaluate` takes."""
    native = {(entry["layer"], entry["kv_head"]): HeadPrecision() for entry in plan["native_heads"]}
    return PrecisionPlan(HeadPrecision.both(plan["precision"]), heads=native)
