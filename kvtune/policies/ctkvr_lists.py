"""CTkvr's first stage: query centroids, and the inverted list of keys that each of them leads to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvtune.attention.scores import shape_scores
from kvtune.geometry import LayerInfo

ITEMS = 1 << 25
"""Scores held at once."""


@dataclass
class InvertedLists:
    """A centroid is the queries of a whole group, so that its kv head has one list for all of them.

    centroids [H, C, G, d] at the model's precision; tokens [H, C, R] int64, positions, best first, -1 as
    padding (R is 0 where no key could be listed).
    """

    centroids: Tensor
    tokens: Tensor


def probabilities(queries: Tensor, keys: Tensor, layer: LayerInfo) -> Iterator[Tensor]:
    """softmax(q·k) of grouped queries [H, C, G, d] over all keys [H, n, d], chunk by chunk: [H, c, G, n].

    Float32. Nothing is masked: a centroid has no position, so there is no causality and no ALiBi.
    """
    heads, _, group, _ = queries.shape
    plain = replace(layer, alibi=None)
    columns = keys.float().transpose(1, 2)
    for part in queries.split(max(1, ITEMS // (heads * group * max(keys.shape[1], 1))), 1):
        logits = shape_scores(torch.matmul(part.float().flatten(1, 2), columns), plain)
        yield torch.softmax(logits, -1).unflatten(1, (-1, group))


def invert(centroids: Tensor, keys: Tensor, first: int, rho: int, layer: LayerInfo) -> Tensor:
    """The ``rho`` best keys of each centroid, [H, C, ≤ rho], among positions ``first`` … n-1.

    centroids [H, C, G, d], keys [H, n, d]. A key's rank is the sum over the group of its probability among
    all n keys.
    """
    count = min(rho, max(keys.shape[1] - first, 0))
    if not count or not centroids.shape[1]:
        return torch.zeros(*centroids.shape[:2], 0, dtype=torch.int64, device=keys.device)
    best = [
        torch.topk(part.sum(2)[..., first:], count).indices for part in probabilities(centroids, keys, layer)
    ]
    return torch.cat(best, 1) + first


def nearest(centroids: Tensor, queries: Tensor, nprobe: int) -> Tensor:
    """The ``nprobe`` nearest centroids, best first: [H, C, G, d] and queries [T, H, G, d] → [T, H, ≤ nprobe].

    Similarity is the sum over the group of the cosine between query and centroid; ties go to the lowest.
    """
    rows = normalize(queries.float(), dim=-1).flatten(2).transpose(0, 1)
    columns = normalize(centroids.float(), dim=-1).flatten(2).transpose(1, 2)
    similarity = torch.matmul(rows, columns).transpose(0, 1)
    return torch.argsort(similarity, dim=-1, descending=True, stable=True)[..., :nprobe]


def union(tokens: Tensor, probed: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct tokens below ``stop`` [T] of the probed lists, [T, H, S], and the list entries read, [T, H].

    tokens [H, C, R], probed [T, H, P]. Tokens descend, -1 as padding.
    """
    heads = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    found = tokens[heads, probed].flatten(2)
    entries = (found >= 0).sum(-1)
    found = torch.where(found < stop[:, None, None], found, -1).sort(-1, descending=True).values
    repeated = torch.zeros_like(found, dtype=torch.bool)
    repeated[..., 1:] = found[..., 1:] == found[..., :-1]
    found = found.masked_fill(repeated, -1).sort(-1, descending=True).values
    width = int((found >= 0).sum(-1).max()) if found.numel() else 0
    return found[..., :width], entries
