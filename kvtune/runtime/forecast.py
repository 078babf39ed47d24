"""The forecast: what the plan would have asked of its caches on the queries of full attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.attention import group_queries
from kvtune.caching import AccessLog
from kvtune.caching.access_log import join_accesses, unit_accesses
from kvtune.policies.full import Full
from kvtune.runtime.engine import Engine
from kvtune.runtime.layer_reads import LayerReads

STEPS_AT_ONCE = 32


@dataclass(frozen=True)
class RecordedSteps:
    """Decode steps of one layer under full attention, and the tokens that the index does not hold yet.

    queries [T, Hq, d] at positions [T]; keys [H, M, d] and values [H, M, dv] from position ``start`` on.
    """

    queries: Tensor
    positions: Tensor
    start: int
    keys: Tensor
    values: Tensor


class QueryRecorder:
    """A sink that keeps the decode steps' queries of some layers until they are taken."""

    def __init__(self, layers: Iterable[int]) -> None:
        self._kept: dict[int, list[tuple[int, Tensor]]] = {layer: [] for layer in layers}

    def __call__(self, layer: int, position: int, queries: Tensor) -> None:
        if layer in self._kept:
            self._kept[layer].append((position, queries.clone()))

    def take(self, engine: Engine, start: int) -> dict[int, RecordedSteps]:
        """What was shown since the last call, with the tokens from position ``start`` on; by layer.

        Empty where nothing was shown.
        """
        taken = {}
        for layer, parts in self._kept.items():
            if parts:
                keys, values = engine.keys_values(layer, start)
                positions = torch.tensor([position for position, _ in parts], device=keys.device)
                queries = torch.cat([rows for _, rows in parts])
                taken[layer] = RecordedSteps(queries, positions, start, keys.clone(), values.clone())
                parts.clear()
        return taken


def sparse_layers(engine: Engine) -> list[int]:
    """The layers that the plan does not keep dense."""
    infos = [engine.loaded.geometry.layer(number) for number in range(engine.loaded.geometry.n_layers)]
    return [info.layer for info in infos if not isinstance(engine.plan.for_layer(info), Full)]


def forecast_log(
    engine: Engine,
    recorded: dict[int, RecordedSteps],
    unit: tuple[int, int],
    context_tokens: int,
    reads: dict[int, LayerReads] | None = None,
) -> AccessLog:
    """The accesses of the plan on ``recorded`` steps, all steps of a layer at once.

    ``engine`` holds the index as it was before the recorded tokens, which are appended to copies of it; the
    base of cache fractions is ``context_tokens``. ``unit`` is (sample, timeline). What the steps of a layer
    read is added to ``reads``, if given.
    """
    geometry = engine.loaded.geometry
    log = AccessLog(geometry.layer(0).page_bytes)
    with torch.inference_mode(False), torch.no_grad():
        for layer, steps in recorded.items():
            policy, index = engine.plan.for_layer(geometry.layer(layer)), engine.index(layer)
            new = torch.arange(steps.keys.shape[1], device=steps.keys.device)
            policy.append(index, steps.keys, steps.values, steps.start + new)
            queries = group_queries(steps.queries, steps.keys.shape[0])
            chosen = [
                policy.select(index, some, where)
                for some, where in zip(queries.split(STEPS_AT_ONCE), steps.positions.split(STEPS_AT_ONCE))
            ]
            if reads is not None:
                counted = reads.setdefault(layer, LayerReads())
                for selection in chosen:
                    counted.add(selection, geometry.layer(layer))
            for head in range(steps.keys.shape[0]):
                parts = [unit_accesses(selection, head, context_tokens) for selection in chosen]
                log.units[*unit, layer, head] = join_accesses(parts, context_tokens)
    return log
