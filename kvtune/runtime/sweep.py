"""A live run at several settings: the live curve over the simulated one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtune.analysis.output import check_absent, json_text, write_files
from kvtune.caching import check_budgets
from kvtune.errors import InputError
from kvtune.models import LoadedModel
from kvtune.policies import get_policy
from kvtune.policies.plan import Plan
from kvtune.progress import Progress, silent
from kvtune.runtime.live import live
from kvtune.runtime.sweep_page import render_sweep
from kvtune.workloads import Sample

DOCUMENT, PAGE = "sweep.json", "sweep.html"
BUDGET, CACHE = "budget", "cache"
_ROW_KEYS = (
    "kl", "delta_nll", "top1", "hit_ratio", "replay_equal", "step_ms", "full_step_ms",
    "predicted_step_ms", "index_build_ms", "gpu_bytes", "host_bytes", "score", "interrupted",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One point of a sweep."""

    value: Any
    plan: Plan
    cache_fraction: float


def settings_of(plan: Plan, fraction: float, name: str, values: Sequence[Any]) -> tuple[str, list[Setting]]:
    """What ``name`` means for ``plan``, and a setting for each of ``values``.

    ``budget`` is the policy's budget parameter, ``cache`` the cache fraction, anything else a parameter of
    the policy. A parameter that is swept is swept in every layer: per-layer values of it are dropped.
    Raises ``InputError`` for an unknown name, a value that the policy refuses, or no value.
    """
    if not values:
        raise InputError(f"--sweep {name} names no value", "write it like --sweep budget=0.01,0.02,0.05")
    if name == CACHE:
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"--sweep cache takes fractions in (0, 1], not '{value}'")
        return "cache_fraction", [Setting(f, plan, f) for f in check_budgets(values)]
    policy = plan.policy
    parameter = policy.budget if name == BUDGET else name
    if parameter is None:
        raise InputError(f"policy '{policy.name}' has no budget to sweep", "name one of its parameters")
    overrides = {
        layer: kept
        for layer, own in plan.overrides.items()
        if (kept := {key: value for key, value in own.items() if key != parameter})
    }
    found = []
    for value in values:
        swept = get_policy(policy.name, {**policy.parameters(), parameter: value})
        used = swept.parameters()[parameter]
        found.append(Setting(used, replace(plan, policy=swept, overrides=overrides), fraction))
    return parameter, found


def sweep(
    loaded: LoadedModel,
    samples: Sequence[Sample],
    plan: Plan,
    name: str,
    values: Sequence[Any],
    *,
    cache_fraction: float = 0.05,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """:func:`kvtune.live` at each of ``values`` of what ``name`` stands for (see :func:`settings_of`).

    Returns ``policy, params, swept, parameter, cache_fraction, engine, interrupted, rows[{value, …}]``; a row
    has the live measures and ``forecast`` (``page, request, token`` from full attention's queries, and
    ``difference_points`` to the live page hits). With ``out``, that folder receives ``sweep.json`` and
    ``sweep.html`` (the curves). Interrupted, it keeps the settings that are done, and the answers of the one
    under way. ``options`` are those of ``live``, without a batch.
    """
    if options.get("batch") is not None:
        raise InputError("--batch and --sweep exclude each other")
    parameter, settings = settings_of(plan, cache_fraction, name, values)
    if out is not None:
        check_absent(Path(out), (DOCUMENT, PAGE), overwrite)
    document: dict[str, Any] = {
        "model": loaded.id,
        "policy": plan.policy.name,
        "params": plan.policy.parameters(),
        "swept": name,
        "parameter": parameter,
        "cache_fraction": None if name == CACHE else cache_fraction,
        "engine": None,
        "notes": [],
        "interrupted": False,
        "rows": [],
    }
    try:
        with (progress or silent).task(f"sweeping {parameter}", len(settings)) as task:
            for setting in settings:
                found = live(
                    loaded,
                    samples,
                    setting.plan,
                    cache_fraction=setting.cache_fraction,
                    progress=progress,
                    **options,
                )
                _add(document, setting, found)
                task.advance()
                if found["interrupted"]:
                    break
    except KeyboardInterrupt:
        if not document["rows"]:
            raise
        document["interrupted"] = True
    if out is not None:
        page, text = render_sweep(document), json_text(document)
        write_files(
            Path(out),
            {
                PAGE: lambda path: path.write_text(page, encoding="utf-8"),
                DOCUMENT: lambda path: path.write_text(text, encoding="utf-8"),
            },
        )
    return document


def _add(document: dict[str, Any], setting: Setting, found: Mapping[str, Any]) -> None:
    forced = found["forecast_hit_ratio"]["forced"]
    forecast = {key: forced[key] for key in ("page", "request", "token", "difference_points")}
    row = {key: found[key] for key in _ROW_KEYS}
    document["rows"].append({"value": setting.value, **row, "forecast": forecast})
    document["engine"], document["notes"] = found["engine"], found["notes"]
    document["interrupted"] = found["interrupted"]
