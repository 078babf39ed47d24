"""Attention scores as the softmax sees them: scaling, softcap, position bias, causality, window."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtune.geometry import LayerInfo


def shape_scores(dots: Tensor, layer: LayerInfo, distance: Tensor | None = None) -> Tensor:
    """Turn raw dot products [..., H, G, S] into logits: scaling, softcap, then ALiBi.

    ``distance`` (query position minus key position, broadcastable to ``dots``) is needed with ALiBi only.
    """
    logits = dots.float() * layer.scaling
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    if layer.alibi is not None:
        if distance is None:
            raise ValueError("ALiBi needs the distance between query and key")
        slopes = torch.tensor(layer.alibi, device=dots.device).view(layer.n_kv_heads, layer.group, 1)
        logits = logits - slopes * distance
    return logits


def eligible(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys each query may see, [T, N]: positions ≤ its own, within its window of ``window`` tokens."""
    distance = query_positions[:, None] - key_positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def attention_scores(
    queries: Tensor, keys: Tensor, query_positions: Tensor, key_positions: Tensor, layer: LayerInfo
) -> Tensor:
    """Logits of every key for every query, [T, H, G, N] float32, -inf where not eligible.

    queries [T, H, G, d], keys [H, N, d], query_positions [T], key_positions [N].
    """
    steps, heads, group, dim = queries.shape
    flat = queries.float().permute(1, 0, 2, 3).reshape(heads, steps * group, dim)
    dots = torch.matmul(flat, keys.float().transpose(1, 2)).view(heads, steps, group, -1).permute(1, 0, 2, 3)
    distance = (query_positions[:, None] - key_positions[None, :])[:, None, None, :]
    logits = shape_scores(dots, layer, distance)
    visible = eligible(query_positions, key_positions, layer.window)[:, None, None, :]
    return logits.masked_fill(~visible, -math.inf)


def group_queries(queries: Tensor, n_kv_heads: int) -> Tensor:
    """[T, Hq, d] → [T, H, G, d]: query head h belongs to kv head ``h // G``."""
    steps, heads, dim = queries.shape
    return queries.view(steps, n_kv_heads, heads // n_kv_heads, dim)
