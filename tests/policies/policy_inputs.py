"""Clustered keys and random queries that the policy tests share."""

from __future__ import annotations

from typing import Any

import torch

from kvtune.geometry import LayerInfo
from kvtune.policies.base import Policy

HEADS, GROUP, DIM = 2, 3, 16
LAYER = LayerInfo(
    layer=3,
    n_layers=8,
    n_heads=HEADS * GROUP,
    n_kv_heads=HEADS,
    head_dim=DIM,
    value_dim=DIM,
    scaling=DIM**-0.5,
    item_bytes=4,
)


def tensors(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [H, n, d] around 40 centres, and values [H, n, d]."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(HEADS, 40, DIM, generator=generator) * 2
    which = torch.randint(0, 40, (n,), generator=generator)
    keys = centres[:, which] + torch.randn(HEADS, n, DIM, generator=generator) * 0.5
    return keys, torch.randn(HEADS, n, DIM, generator=generator)


def queries(steps: int, seed: int = 1) -> torch.Tensor:
    """Queries [steps, H, G, d]."""
    return torch.randn(steps, HEADS, GROUP, DIM, generator=torch.Generator().manual_seed(seed)) * 2


NONE = torch.empty(HEADS, GROUP, 0, DIM)
"""No prompt queries."""


def built(policy: Policy, n: int, m: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """An index of ``n`` prompt tokens to which ``m`` were appended, and all keys and values."""
    keys, values = tensors(n + m)
    index = policy.build(keys[:, :n], values[:, :n], NONE, LAYER)
    policy.append(index, keys[:, n:], values[:, n:], torch.arange(n, n + m))
    return index, keys, values
