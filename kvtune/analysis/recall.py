"""Recall@100: how many of a query's best tokens a selection holds. The truth is exact."""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
from torch import Tensor

from kvtune.analysis.locality import top_tokens
from kvtune.attention import attention_scores
from kvtune.geometry import LayerInfo
from kvtune.policies.base import Selection
from kvtune.traces import TimelineLayer

RECALL_K = 100


def recalls(
    layer: TimelineLayer,
    queries: Tensor,
    positions: Tensor,
    selection: Selection,
    known: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Index recall, attention recall, [t, H, G] each, and the 100 best tokens [t, H, G, 100] int32.

    queries [t, H, G, d] at positions [t]. Index recall is that among the tokens outside the selection's
    steady zone. The best tokens do not depend on the policy: where they are ``known``, they are not searched
    again.
    """
    length = layer.keys.shape[1]
    resident = selection.resident if selection.resident is not None else selection.positions.shape[-1]
    held = _membership(selection.positions, length)
    steady = _membership(selection.positions[..., :resident], length)
    outside, best = _best_tokens(layer, queries, positions, steady, known)
    return _recall(outside, held), _recall(best, held), best


def _best_tokens(
    layer: TimelineLayer, queries: Tensor, positions: Tensor, steady: Tensor, known: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The 100 best tokens outside ``steady`` [t, H, N] and among all, [t, H, G, 100] each, -1 beyond."""
    keys, info = layer.keys, layer.info
    if _has_kernel(queries, keys, info):
        from kvtune.attention.triton_topk import top_keys

        outside = top_keys(queries, keys, positions, RECALL_K, info.window, steady)
        best = top_keys(queries, keys, positions, RECALL_K, info.window) if known is None else known
        return outside, best
    logits = attention_scores(queries, keys, positions, layer.key_positions, info)
    best = top_tokens(logits, RECALL_K) if known is None else known
    return top_tokens(logits.masked_fill(steady[:, :, None, :], -math.inf), RECALL_K), best


def _has_kernel(queries: Tensor, keys: Tensor, info: LayerInfo) -> bool:
    """Whether raw products can be ranked on the device as the logits would be."""
    if not keys.is_cuda or info.alibi is not None or info.scaling <= 0 or not find_spec("triton"):
        return False
    from kvtune.attention.triton_topk import supports

    return supports(queries, keys, RECALL_K)


def _membership(positions: Tensor, length: int) -> Tensor:
    """Which of ``length`` tokens are in ``positions`` [t, H, S]: bool [t, H, length]."""
    mask = torch.zeros(*positions.shape[:2], length + 1, dtype=torch.bool, device=positions.device)
    mask.scatter_(2, torch.where(positions < 0, length, positions), True)
    return mask[..., :length]


def _recall(wanted: Tensor, held: Tensor) -> Tensor:
    """Share of tokens ``wanted`` [t, H, G, k] (-1: none) that are held [t, H, N]; 1 where none is wanted."""
    steps, heads, group, k = wanted.shape
    there = torch.gather(held, 2, wanted.clamp_min(0).long().view(steps, heads, group * k))
    found = (there.view(wanted.shape) & (wanted >= 0)).sum(-1)
    count = (wanted >= 0).sum(-1)
    return torch.where(count > 0, found / count.clamp_min(1), 1.0)
