"""CTkvr's second stage: the candidates' true scores, with its options on what a score is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtune.attention.scores import shape_scores
from kvtune.geometry import LayerInfo

_GATHER_BYTES = 128 << 20
INT8_SCALE_BYTES = 2


def rescore(
    queries: Tensor,
    positions: Tensor,
    keys: Tensor,
    candidates: Tensor,
    layer: LayerInfo,
    weights: tuple[float, float] | None = None,
    int8: bool = False,
) -> Tensor:
    """Rank of each candidate, [T, H, S] float32, -inf where ``candidates`` [T, H, S] is -1.

    The sum over the group of its probability among the candidates. queries [T, H, G, d], positions [T],
    keys [H, N, d]. ``weights`` multiplies it by a factor that runs linearly from the first to the second
    value over the positions 0 … own; ``int8`` scores keys rounded by :func:`as_int8`.
    """
    heads, width = candidates.shape[1:]
    size = max(1, _GATHER_BYTES // max(1, heads * width * keys.shape[2] * 4))
    rows = torch.arange(heads, device=keys.device)[:, None]
    parts = []
    for chosen, query, position in zip(candidates.split(size), queries.split(size), positions.split(size)):
        found = keys[rows, chosen.clamp_min(0)].float()
        if int8:
            found = as_int8(found)
        dots = torch.matmul(query.float(), found.transpose(2, 3))
        logits = shape_scores(dots, layer, (position[:, None, None] - chosen)[:, :, None, :])
        logits = logits.masked_fill((chosen < 0)[:, :, None, :], -math.inf)
        rank = torch.softmax(logits, -1).sum(2)
        if weights is not None:
            share = chosen / position.clamp_min(1)[:, None, None]
            rank = rank * (weights[0] + (weights[1] - weights[0]) * share)
        parts.append(rank.masked_fill(chosen < 0, -math.inf))
    return torch.cat(parts)


def as_int8(keys: Tensor) -> Tensor:
    """Keys [..., d] as symmetric INT8 with one scale a token would return them; error ≤ max|k| / 254."""
    scale = keys.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, torch.round(keys / scale.clamp_min(1e-38)) * scale, keys)
