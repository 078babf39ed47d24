"""The three-zone merge: exact and estimated parts joined by log-sum-exp in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.attention.scores import shape_scores
from kvtune.geometry import LayerInfo
from kvtune.policies.base import Clusters, Selection


@dataclass
class Zone:
    """A part of the softmax: logits [T, H, G, S] (-inf where absent), values [H, S, dv] or [T, H, S, dv]."""

    logits: Tensor
    values: Tensor


def merge_zones(zones: Sequence[Zone], layer: LayerInfo) -> tuple[Tensor, Tensor]:
    """Attention over the union of ``zones``: output [T, H, G, dv] and log-sum-exp [T, H, G], float32.

    An attention sink of the layer is one extra denominator term, added once. Where every logit is
    -inf, the output is 0 and the log-sum-exp -inf.
    """
    peak = torch.stack([zone.logits.amax(-1) for zone in zones if zone.logits.shape[-1]]).amax(0)
    sinks = None
    if layer.sinks is not None:
        sinks = torch.tensor(layer.sinks, device=peak.device).view(1, layer.n_kv_heads, layer.group)
        peak = torch.maximum(peak, sinks)
    base = torch.where(peak == -math.inf, 0.0, peak)
    total = torch.zeros_like(base) if sinks is None else torch.exp(sinks - base)
    output: Tensor | float = 0.0
    for zone in zones:
        weights = torch.exp(zone.logits - base[..., None])
        total = total + weights.sum(-1)
        output = output + _weigh(weights, zone.values.float())
    safe = torch.where(total == 0, 1.0, total)
    assert isinstance(output, Tensor)
    return output / safe[..., None], base + torch.log(total)


def _weigh(weights: Tensor, values: Tensor) -> Tensor:
    """weights [T, H, G, S] times values [H, S, dv] or [T, H, S, dv] → [T, H, G, dv]."""
    if values.dim() == 4:
        return torch.matmul(weights, values)
    steps, heads, group, size = weights.shape
    flat = weights.permute(1, 0, 2, 3).reshape(heads, steps * group, size)
    return torch.matmul(flat, values).view(heads, steps, group, -1).permute(1, 0, 2, 3)


def estimation_zone(
    queries: Tensor,
    query_positions: Tensor,
    clusters: Clusters,
    estimated: Tensor,
    layer: LayerInfo,
) -> Zone:
    """The estimated clusters as one zone of pseudo-tokens (RetroInfer, arXiv 2505.02922).

    A cluster of size s, centroid c and value sum V contributes s·e^{q·c} to the denominator and
    V·e^{q·c} to the numerator: a token with logit q·c + ln s and value V / s. queries [T, H, G, d],
    estimated [T, H, E] with -1 as padding.

    That weighs a cluster too little, as the mean of e^{q·k} is at least e^{q·c} (Jensen). With ``spreads`` r²
    the logit gains ½ |q|² r² / d: what the second cumulant adds where keys spread evenly in all directions.
    """
    chosen = estimated.clamp_min(0)
    centroids = _gather_rows(clusters.centroids.float(), chosen)
    sizes = torch.gather(clusters.sizes.expand(len(chosen), -1, -1), 2, chosen).float()
    sums = _gather_rows(clusters.value_sums.float(), chosen)
    distance = None
    if clusters.mean_positions is not None:
        mean = torch.gather(clusters.mean_positions.expand(len(chosen), -1, -1), 2, chosen)
        distance = (query_positions[:, None, None] - mean)[:, :, None, :]
    dots = torch.matmul(queries.float(), centroids.transpose(2, 3))
    if clusters.spreads is not None:
        spreads = torch.gather(clusters.spreads.expand(len(chosen), -1, -1), 2, chosen)
        norms = (layer.scaling * queries.float()).square().mean(-1)
        gains = 0.5 * norms[..., None] * spreads[:, :, None, :]
    else:
        gains = torch.zeros((), device=dots.device)
    absent = (estimated < 0) | (sizes == 0)
    logits = shape_scores(dots, layer, distance) + torch.log(sizes.clamp_min(1))[:, :, None, :] + gains
    logits = logits.masked_fill(absent[:, :, None, :], -math.inf)
    return Zone(logits, sums / sizes.clamp_min(1)[..., None])


def exact_zone(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    layer: LayerInfo,
) -> Zone:
    """The exact tokens of ``selection``, from keys [H, N, d] and values [H, N, dv] (row = position)."""
    chosen = selection.positions.clamp_min(0)
    dots = torch.matmul(queries.float(), _gather_rows(keys, chosen).float().transpose(2, 3))
    distance = (query_positions[:, None, None] - chosen)[:, :, None, :]
    logits = shape_scores(dots, layer, distance)
    if selection.log_weights is not None:
        logits = logits + selection.log_weights
    logits = logits.masked_fill((selection.positions < 0)[:, :, None, :], -math.inf)
    return Zone(logits, _gather_rows(values, chosen))


def sparse_attention(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    layer: LayerInfo,
) -> tuple[Tensor, Tensor]:
    """Attention output [T, H, G, dv] and log-sum-exp of one selection, reading only what it names."""
    zones = [exact_zone(queries, query_positions, keys, values, selection, layer)]
    if selection.estimated is not None and selection.clusters is not None:
        zones.append(
            estimation_zone(queries, query_positions, selection.clusters, selection.estimated, layer)
        )
    return merge_zones(zones, layer)


def _gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows [H, N, d] at index [T, H, S] → [T, H, S, d]."""
    heads, length, dim = rows.shape
    flat = index + length * torch.arange(heads, device=rows.device)[:, None]
    return rows.reshape(heads * length, dim).index_select(0, flat.flatten()).view(*index.shape, dim)
