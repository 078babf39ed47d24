"""SimHash tables: which bucket a vector falls into, and how often two vectors share one."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def hyperplanes(tables: int, bits: int, dim: int, seed: int) -> Tensor:
    """Random normals of ``tables`` hash tables of ``bits`` bits, [K, L, d] float32 on the CPU."""
    return torch.randn(bits, tables, dim, generator=torch.Generator().manual_seed(seed))


def buckets(vectors: Tensor, planes: Tensor) -> Tensor:
    """The bucket of each vector in each table: [..., d], planes [K ≤ 15, L, d] → [..., L] int16."""
    rows = vectors.float()
    found = torch.zeros(*rows.shape[:-1], planes.shape[1], dtype=torch.int16, device=rows.device)
    for bit, normals in enumerate(planes):
        found += (torch.matmul(rows, normals.T) > 0).to(torch.int16) << bit
    return found


def collisions(asked: Tensor, stored: Tensor) -> Tensor:
    """In how many tables query and key share a bucket: exact integers, equal on every device.

    Bucket numbers asked [T, H, G, L] and stored [H, n, L] → [T, H, G, n] int16.
    """
    tables = stored.transpose(1, 2).contiguous()
    counts = asked.new_zeros(*asked.shape[:3], stored.shape[1])
    if asked.device.type == "cpu":
        from kvtune.policies.simhash_kernel import count_equal

        count_equal(asked.contiguous().numpy(), tables.numpy(), counts.numpy())
        return counts
    for step, count in zip(asked, counts):
        for table in range(tables.shape[1]):
            count += tables[:, None, table] == step[:, :, table, None]
    return counts


def sampling_probability(cosine: Tensor, bits: int, tables: int, min_collisions: int) -> Tensor:
    """P(``min_collisions`` of ``tables`` tables of ``bits`` bits collide, or more), in float64.

    A bit agrees with probability 1 − arccos(cosine)/π.
    """
    agree = 1 - torch.arccos(cosine.double().clamp(-1, 1)) / math.pi
    collide = agree**bits
    fewer = torch.zeros_like(collide)
    for count in range(min_collisions):
        ways = math.comb(tables, count)
        fewer = fewer + ways * collide**count * (1 - collide) ** (tables - count)
    return (1 - fewer).clamp(0, 1)
