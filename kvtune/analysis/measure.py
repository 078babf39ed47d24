"""Everything measured on one layer of one timeline, in chunks of decode steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtune.analysis.concentration import (
    MASS_SHARES,
    entropy,
    token_probabilities,
    tokens_for_mass,
    zone_mass,
)
from kvtune.analysis.evaluate import (
    DecodeQueries,
    build_index,
    chunks,
    decode_queries,
    evaluate,
    layer_truth,
    true_scores,
)
from kvtune.analysis.locality import (
    LAGS,
    common_tokens,
    lag_pairs,
    overlap,
    query_cosine,
    set_overlap,
    top_tokens,
    working_set,
)
from kvtune.analysis.metrics import Observations
from kvtune.geometry import PAGE_TOKENS, LayerInfo
from kvtune.policies.base import Policy, Selection
from kvtune.quantisation import quantised
from kvtune.traces import TimelineLayer

TOP_K = 100
_CHUNK_ITEMS = 1 << 25
"""Scores held at once, [t, Hq, N] together."""


@dataclass
class LayerRanking:
    """Top tokens of the decode steps of one layer, and what else one pass over the scores gives.

    top [T, Hq, k + margin] per query head; shared [T, k] by the mean probability over the query heads
    """

    info: LayerInfo
    top: Tensor
    shared: Tensor
    observations: list[Observations] = field(default_factory=list)


def measure_attention(
    layer: TimelineLayer, prompt_length: int, k: int = TOP_K, lags: Sequence[int] = LAGS
) -> LayerRanking:
    """Locality and concentration of full attention over the decode steps of ``layer``."""
    steps = decode_queries(layer)
    if not len(steps.positions):
        return LayerRanking(layer.info, torch.zeros(0, 0, 0), torch.zeros(0, k))
    pairs = {lag: lag_pairs(steps.turns, steps.positions, lag) for lag in lags}
    pairs = {lag: found for lag, found in pairs.items() if len(found[0])}
    ranking = _rank(layer, steps, prompt_length, k, margin=max(pairs, default=0))
    visible = _visible(steps, layer.info)
    pages = (visible + PAGE_TOKENS - 1) // PAGE_TOKENS
    seen = ranking.observations
    seen.append(Observations("visible_tokens", visible[:, None], steps.turns))
    seen.append(Observations("full_read_bytes", (pages * layer.info.page_bytes)[:, None], steps.turns))
    queries = steps.queries.flatten(1, 2)
    for lag, found in pairs.items():
        turns = steps.turns[found[0]]
        shared = overlap(ranking.top, steps.positions, found, k, layer.info.window)
        common = common_tokens(steps.positions, found, layer.info.window)
        chance = torch.where(common > 0, common.clamp_max(k) / common, math.nan)
        seen.append(Observations("query_cosine", query_cosine(queries, found), turns, lag))
        seen.append(Observations("overlap", shared, turns, lag))
        seen.append(Observations("overlap_chance", chance[:, None], turns, lag))
    seen.extend(_working_sets(ranking.top[..., :k], steps, list(pairs)))
    return ranking


def _rank(
    layer: TimelineLayer, steps: DecodeQueries, prompt_length: int, k: int, margin: int
) -> LayerRanking:
    """One pass over the scores: top tokens and the concentration of every step."""
    query_heads, length = steps.queries.shape[1] * steps.queries.shape[2], layer.keys.shape[1]
    size = max(1, min(32, _CHUNK_ITEMS // (query_heads * length)))
    visible = _visible(steps, layer.info)
    columns: dict[str, list[Tensor]] = {}
    tops, shared = [], []
    for chunk in chunks(len(steps.positions), size):
        scores = true_scores(layer, steps, chunk).flatten(1, 2)
        probabilities = token_probabilities(scores)
        tops.append(top_tokens(scores, k + margin))
        mean = probabilities.mean(1).masked_fill(scores[:, 0] == -math.inf, -math.inf)
        shared.append(top_tokens(mean, k))
        tokens = tokens_for_mass(probabilities)
        sink, local, late = zone_mass(probabilities, steps.positions[chunk], prompt_length)
        found = {
            "entropy": entropy(probabilities),
            **{f"tokens_{share * 100:.0f}": tokens[..., i] for i, share in enumerate(MASS_SHARES)},
            "token_share_95": tokens[..., MASS_SHARES.index(0.95)] / visible[chunk, None],
            "sink_mass": sink,
            "local_mass": local,
            "late_mass": late,
        }
        for name, values in found.items():
            columns.setdefault(name, []).append(values)
    observations = [Observations(name, torch.cat(parts), steps.turns) for name, parts in columns.items()]
    return LayerRanking(layer.info, torch.cat(tops), torch.cat(shared), observations)


def _working_sets(top: Tensor, steps: DecodeQueries, widths: list[int]) -> list[Observations]:
    """The working set of each width; a width longer than every turn gives nothing."""
    found = []
    for width in [1, *(w for w in widths if w > 1)]:
        sizes, turns = working_set(top, steps.turns, width)
        if len(sizes):
            found.append(Observations("working_set", sizes, turns, width))
    return found


def measure_neighbour(
    below: LayerRanking | None, ranking: LayerRanking, layer: TimelineLayer
) -> list[Observations]:
    """How much of a layer's top tokens the layer right below ranks on top too (mean over its heads).

    Nothing where the layer below was not measured or sees another window.
    """
    steps = decode_queries(layer)
    adjacent = below is not None and below.info.layer + 1 == ranking.info.layer
    if below is None or not adjacent or below.info.window != ranking.info.window or not len(steps.turns):
        return []
    size = (ranking.shared >= 0).sum(-1)
    shared = set_overlap(ranking.shared, below.shared)
    chance = size / _visible(steps, layer.info)
    return [
        Observations("layer_overlap", shared[:, None], steps.turns),
        Observations("layer_overlap_chance", chance[:, None], steps.turns),
    ]


def _visible(steps: DecodeQueries, info: LayerInfo) -> Tensor:
    """Tokens each step may see, [T]."""
    visible = steps.positions + 1
    return visible if info.window is None else visible.clamp_max(info.window)


def measure_policy(
    layer: TimelineLayer, prompt_length: int, policy: Policy, precision: str | None = None
) -> list[Observations]:
    """What ``policy`` keeps, loses and reads on the decode steps of ``layer``, held in ``precision``."""
    turns = decode_queries(layer).turns
    if not len(turns):
        return []
    held = layer if precision is None else quantised(layer, precision, prompt_length)
    index, truth = build_index(policy, held, prompt_length), layer_truth(layer)
    estimates = not policy.evicts and _estimates(policy, index, held)
    result = evaluate(policy, layer, prompt_length, index=index, truth=truth, precision=precision)
    names = (
        "recall_index",
        "recall_attention",
        "mass",
        "error",
        "read_bytes",
        "scan_bytes",
        "effective_tokens",
    )
    found = [Observations(name, getattr(result, name), turns) for name in names]
    if estimates:
        bare = evaluate(
            ExactOnly(policy),
            layer,
            prompt_length,
            index=index,
            truth=truth,
            recall=False,
            precision=precision,
        )
        found.append(Observations("error_without_estimation", bare.error, turns))
    return found


def _estimates(policy: Policy, index: object, layer: TimelineLayer) -> bool:
    """Whether the policy uses an estimation zone on this layer (judged by its last step)."""
    steps = decode_queries(layer)
    selection = policy.select(index, steps.queries[-1:], steps.positions[-1:])
    return selection.estimated is not None and bool((selection.estimated >= 0).any())


@dataclass(frozen=True)
class ExactOnly(Policy):
    """``policy`` with its estimation zone dropped: what the exact tokens alone achieve, on the same index."""

    policy: Policy

    name: ClassVar[str] = "exact_only"
    title: ClassVar[str] = "A policy without its estimation zone"
    source: ClassVar[str] = "ablation"

    def build(self, keys: Tensor, values: Tensor, prompt_queries: Tensor, layer: LayerInfo) -> Any:
        return self.policy.build(keys, values, prompt_queries, layer)

    def select(self, index: Any, queries: Tensor, positions: Tensor) -> Selection:
        return replace(self.policy.select(index, queries, positions), estimated=None, clusters=None)

    def append(self, index: Any, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.policy.append(index, keys, values, positions)

    @classmethod
    def lossless(cls, n: int) -> None:
        return None
