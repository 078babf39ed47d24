"""What the prompt's last queries attend: the evidence from which eviction and head-wise methods decide."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvtune.attention.scores import attention_scores
from kvtune.errors import InputError
from kvtune.geometry import LayerInfo
from kvtune.policies.base import Policy

_CHUNK_ITEMS = 1 << 25
"""Probabilities held at once: 128 MiB."""


def attention_mass(logits: Tensor, layer: LayerInfo) -> Tensor:
    """Softmax over the last dimension of logits [T, H, G, N]; a sink of the layer takes its share, unseen."""
    if layer.sinks is None:
        return torch.softmax(logits, -1)
    sinks = torch.tensor(layer.sinks, device=logits.device).view(1, layer.n_kv_heads, layer.group, 1)
    return torch.softmax(torch.cat([logits, sinks.expand(len(logits), -1, -1, -1)], -1), -1)[..., :-1]


def prompt_attention(
    prompt_queries: Tensor, keys: Tensor, layer: LayerInfo
) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention of the last prompt queries over the prompt, some queries at a time.

    prompt_queries [H, G, W, d] of the last W positions of the prompt, keys [H, N, d] of all of it. Yields
    positions [t] and probabilities [t, H, G, N], float32; nothing where W = 0.
    """
    heads, group, _, _ = prompt_queries.shape
    n = keys.shape[1]
    queries = prompt_queries.permute(2, 0, 1, 3)[-n:]
    if not len(queries):
        return
    positions = torch.arange(n - len(queries), n, device=keys.device)
    where = torch.arange(n, device=keys.device)
    size = max(1, _CHUNK_ITEMS // (heads * group * n))
    for some, at in zip(queries.split(size), positions.split(size)):
        yield at, attention_mass(attention_scores(some, keys, at, where, layer), layer)


def summed_attention(prompt_queries: Tensor, keys: Tensor, layer: LayerInfo) -> Tensor:
    """Attention that each prompt token received from the last prompt queries and the group, [H, N]."""
    total = torch.zeros(keys.shape[:2], device=keys.device)
    for _, mass in prompt_attention(prompt_queries, keys, layer):
        total += mass.sum((0, 2))
    return total


def pooled(scores: Tensor, kernel: int, pooling: str) -> Tensor:
    """Scores [H, N] smoothed along the tokens by ``avg`` (zeros beyond the ends) or ``max``, odd kernel."""
    rows = scores[:, None]
    if pooling == "avg":
        return avg_pool1d(rows, kernel, stride=1, padding=kernel // 2)[:, 0]
    return max_pool1d(rows, kernel, stride=1, padding=kernel // 2)[:, 0]


def best_tokens(scores: Tensor, count: int) -> Tensor:
    """The ``count`` best columns of scores [H, N], best first, ties to the earliest: [H, ≤ count]."""
    return torch.argsort(scores, dim=1, descending=True, stable=True)[:, :count]


def no_prompt_queries(policy: Policy, layer: LayerInfo) -> InputError:
    """The refusal of a method that decides by prompt queries where there are none."""
    return InputError(
        f"policy '{policy.name}': layer {layer.layer} has no prompt queries to decide by",
        f"capture with --prompt-queries {policy.prompt_window}",
    )
