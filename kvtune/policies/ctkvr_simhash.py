"""CTkvr option ``simhash``: near-duplicate keys leave an inverted list before they cost a score."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtune.policies.ctkvr_lists import ITEMS

BITS = 64


def signatures(keys: Tensor) -> Tensor:
    """Signs of 64 fixed random projections of the mean-centred keys: [H, n, d] → [H, n, 64] of ±1, float32.

    The share of equal bits estimates 1 - angle/π (Charikar, STOC 2002). Keys of a head share a large mean,
    without which all of them would look alike.
    """
    generator = torch.Generator().manual_seed(0)
    planes = torch.randn(keys.shape[2], BITS, generator=generator).to(keys.device)
    centred = keys.float() - keys.mean(1, keepdim=True, dtype=torch.float32)
    return torch.where(torch.matmul(centred, planes) >= 0, 1.0, -1.0)


def thin(tokens: Tensor, signs: Tensor, similarity: float) -> Tensor:
    """Lists [H, C, R] without the tokens that nearly repeat a better-ranked one of the same list.

    Two tokens nearly repeat each other where at least the share ``similarity`` of their 64 bits is equal.
    Order is kept; -1 pads the end.
    """
    heads, _, width = tokens.shape
    rows = torch.arange(heads, device=tokens.device)[:, None, None]
    threshold = BITS * (2 * similarity - 1)
    thinned = []
    for part in tokens.split(max(1, ITEMS // (heads * max(width, BITS) ** 2)), 1):
        bits = signs[rows, part.clamp_min(0)]
        better = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril(-1)
        near = (torch.matmul(bits, bits.transpose(2, 3)) >= threshold) & better & (part >= 0)[:, :, None]
        gone = near.any(-1) | (part < 0)
        order = torch.argsort(gone.int(), dim=-1, stable=True)
        thinned.append(torch.gather(part.masked_fill(gone, -1), 2, order))
    return torch.cat(thinned, 1) if thinned else tokens
