"""What a sparse-prefill pattern costs: mass and output error on the recorded prompt queries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.analysis.evaluate import chunks
from kvtune.attention import Zone, attention_scores, group_queries, merge_zones
from kvtune.errors import InputError
from kvtune.geometry import LayerInfo
from kvtune.policies.layout import steady_zone
from kvtune.policies.streaming import Streaming
from kvtune.policies.tri_shape import TriShape
from kvtune.traces import TimelineLayer


@dataclass
class PatternError:
    """One pattern on the recorded prompt queries of one layer.

    positions [T] and keys attended [T]; per query head [T, Hq]: ``mass`` (softmax probability of the attended
    keys) and ``error`` (‖o − o_full‖ / ‖o_full‖, float32).
    """

    positions: Tensor
    attended: Tensor
    mass: Tensor
    error: Tensor


def prefill_pattern_error(layer: TimelineLayer, prompt_length: int, pattern: Streaming) -> PatternError:
    """Mass and output error of ``pattern`` (a_shape, tri_shape, streaming) while prefilling a prompt.

    Measured on the queries of phase 'prompt' before position ``prompt_length``, which the trace holds for the
    last tokens of the context and of the question. A layer's keys, values and queries are those of a dense
    prefill: errors that reach it from the layers below are left out. Raises ``InputError`` where no prompt
    query is recorded, or no values.
    """
    chosen = ~layer.decode & (layer.query_positions < prompt_length)
    positions = layer.query_positions[chosen]
    if not len(positions):
        raise InputError(
            f"layer {layer.info.layer} has no prompt queries before position {prompt_length}",
            "capture with --prompt-queries 1024",
        )
    queries = group_queries(layer.queries[chosen], layer.keys.shape[0])
    keys, values = layer.keys[:, :prompt_length], layer.values[:, :prompt_length]
    parts = []
    for chunk in chunks(len(positions)):
        allowed = pattern_mask(positions[chunk], prompt_length, pattern, layer.info)
        parts.append(_outcome(queries[chunk], positions[chunk], keys, values, allowed, layer.info))
    attended, mass, error = (torch.cat(column) for column in zip(*parts))
    return PatternError(positions, attended, mass, error)


def pattern_mask(positions: Tensor, prompt_length: int, pattern: Streaming, info: LayerInfo) -> Tensor:
    """The keys that queries at ``positions`` [T] attend under ``pattern``: bool [T, prompt_length]."""
    start = positions + 1 - pattern.recent
    if isinstance(pattern, TriShape):
        start = torch.where(positions >= prompt_length - pattern.n_last, 0, start)
    rows = steady_zone(positions, pattern.sink, start, info.window)
    mask = torch.zeros(len(positions), prompt_length + 1, dtype=torch.bool, device=positions.device)
    mask.scatter_(1, torch.where(rows < 0, prompt_length, rows), True)
    return mask[:, :prompt_length]


def _outcome(
    queries: Tensor, positions: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, info: LayerInfo
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys attended [t], mass [t, Hq] and error [t, Hq] of queries [t, H, G, d]."""
    where = torch.arange(keys.shape[1], device=keys.device)
    logits = attention_scores(queries, keys, positions, where, info)
    exact, lse = merge_zones([Zone(logits, values)], info)
    kept = logits.masked_fill(~allowed[:, None, None, :], -math.inf)
    output, _ = merge_zones([Zone(kept, values)], info)
    mass = torch.exp(torch.logsumexp(kept, -1) - lse).clamp(max=1.0)
    norm = torch.linalg.vector_norm(exact, dim=-1).clamp_min(1e-30)
    error = torch.linalg.vector_norm(output - exact, dim=-1) / norm
    return allowed.sum(1), mass.flatten(1), error.flatten(1)
