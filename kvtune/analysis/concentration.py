"""Concentration of attention: how few tokens carry the softmax, and where they lie.

All functions take attention probabilities [..., N] over a query's eligible tokens (0 where not eligible).
A learned attention sink is no token: the probabilities sum to 1 over the tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

MASS_SHARES = (0.90, 0.95, 0.99)
SINK_TOKENS = 4
LOCAL_TOKENS = 64
"""RetroInfer's steady zone (arXiv 2505.02922): the first 4 and the last 64 tokens."""


def token_probabilities(scores: Tensor) -> Tensor:
    """Softmax over the tokens in float32: masked logits [..., N] (-inf: not eligible) → [..., N]."""
    return torch.softmax(scores.float(), dim=-1)


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy -Σ p ln p in nats, [...]; its exponential is the effective number of tokens attended."""
    return torch.special.entr(probabilities).sum(-1)


def tokens_for_mass(probabilities: Tensor, shares: Sequence[float] = MASS_SHARES) -> Tensor:
    """The fewest tokens that together hold each share of the attention mass, [..., len(shares)] int64.

    Exact: the best tokens are added, largest first, until the share is reached.
    """
    ordered = _sorted(probabilities).flip(-1)
    reached = ordered.cumsum(-1, dtype=torch.float64)
    wanted = reached[..., -1:] * torch.tensor(shares, dtype=torch.float64, device=reached.device)
    return torch.searchsorted(reached, wanted.contiguous()) + 1


def _sorted(values: Tensor) -> Tensor:
    """Ascending along the last axis; numpy's vectorised sort is several times torch's on a CPU."""
    if values.is_cuda:
        return values.sort(-1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


def zone_mass(probabilities: Tensor, positions: Tensor, prompt_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mass on the sink, local and late tokens, [t, Hq] each: probabilities [t, Hq, N], positions [t].

    Sink: the first 4 tokens. Local: the last 64 up to the query's own. Late: tokens after the prompt
    (made while decoding, or fed in later turns), which no index built on the prompt knows. Local and late
    tokens may be the same ones.
    """
    sink = probabilities[..., :SINK_TOKENS].sum(-1)
    late = probabilities[..., prompt_length:].sum(-1)
    places = torch.arange(probabilities.shape[-1], device=probabilities.device)
    near = places[None, :] > positions[:, None] - LOCAL_TOKENS
    local = (probabilities * near[:, None, :]).sum(-1)
    return sink, local, late
