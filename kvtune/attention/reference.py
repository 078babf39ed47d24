"""Exact attention, twice: float64 and obvious (the measure of everything), float32 and batched."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvtune.attention.scores import attention_scores
from kvtune.attention.zones import Zone, merge_zones
from kvtune.geometry import LayerInfo


def reference_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    layer: LayerInfo,
) -> Tensor:
    """Slow exact attention in float64, one query head and step at a time.

    queries [T, Hq, d], keys [H, N, d], values [H, N, dv] → [T, Hq, dv] float64. Query head h reads kv
    head h // G; a query sees keys at positions ≤ its own and inside the layer's window.
    """
    output = torch.zeros(*queries.shape[:2], values.shape[-1], dtype=torch.float64)
    for step, position in enumerate(query_positions.tolist()):
        for head in range(queries.shape[1]):
            kv = head // layer.group
            logits, rows = [], []
            for row, key_position in enumerate(key_positions.tolist()):
                distance = position - key_position
                if distance < 0 or (layer.window is not None and distance >= layer.window):
                    continue
                logit = float(queries[step, head].double() @ keys[kv, row].double()) * layer.scaling
                if layer.softcap is not None:
                    logit = layer.softcap * math.tanh(logit / layer.softcap)
                if layer.alibi is not None:
                    logit -= layer.alibi[head] * distance
                logits.append(logit)
                rows.append(row)
            terms = logits if layer.sinks is None else [*logits, layer.sinks[head]]
            weights = torch.softmax(torch.tensor(terms, dtype=torch.float64), 0)[: len(rows)]
            output[step, head] = weights @ values[kv, rows].double()
    return output


def exact_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    layer: LayerInfo,
) -> tuple[Tensor, Tensor]:
    """Batched exact attention in float32: output [T, H, G, dv] and log-sum-exp [T, H, G].

    queries [T, H, G, d]; the other shapes as in :func:`reference_attention`.
    """
    logits = attention_scores(queries, keys, query_positions, key_positions, layer)
    return merge_zones([Zone(logits, values)], layer)
