"""Laying tokens out as padded rows, and retrieved tokens as the 16-token blocks a cache holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.geometry import PAGE_TOKENS
from kvtune.policies.base import Selection

BLOCK_TOKENS = 16
"""Tokens per position block: what token-level methods fetch from."""


def span(start: Tensor, stop: Tensor) -> Tensor:
    """Positions start…stop-1 as rows padded with -1: start [T], stop [T] → [T, widest]."""
    width = int((stop - start).clamp_min(0).max()) if len(start) else 0
    grid = start[:, None] + torch.arange(width, device=start.device)
    return torch.where(grid < stop[:, None], grid, -1)


def steady_zone(positions: Tensor, sink: int, tail_start: Tensor, window: int | None = None) -> Tensor:
    """The resident tokens at each step, [T, S]: the first ``sink``, then ``tail_start`` … own position.

    positions [T], tail_start [T]. A ``window`` cuts both from the left.
    """
    first = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp_min(0)
    end = positions + 1
    sinks = span(first, torch.minimum(end, torch.full_like(end, sink)))
    tail = span(torch.maximum(first, tail_start.clamp_min(sink)), end)
    return torch.cat([sinks, tail], dim=1)


def per_head(rows: Tensor, heads: int) -> Tensor:
    """The same rows [T, S] for every kv head: [T, H, S]."""
    return rows[:, None, :].expand(-1, heads, -1)


@dataclass
class Blocks:
    """Cacheable blocks of a step in rank order: ids, pages and tokens, each [T, H, B] (-1 / 0 padding).

    ``touched`` [T, H]: pages that hold a wanted token, all blocks together.
    """

    ids: Tensor
    pages: Tensor
    tokens: Tensor
    touched: Tensor


def position_blocks(ranked: Tensor, length: int, size: int = BLOCK_TOKENS) -> Blocks:
    """The blocks of ``size`` positions that hold the tokens ``ranked`` [T, H, S] (best first, -1 as padding).

    A block's rank is that of its best token. A cache holds and fetches a block whole, while attention
    reads only the pages that hold a wanted token (``touched``). ``length`` bounds the positions; ``size``
    is a multiple of a page's 8 tokens.
    """
    steps, heads, width = ranked.shape
    n_pages = -(-max(length, 1) // size) * (size // PAGE_TOKENS)
    wanted = ranked >= 0
    page = torch.where(wanted, ranked // PAGE_TOKENS, n_pages)
    tokens = torch.zeros(steps, heads, n_pages + 1, dtype=torch.int64, device=ranked.device)
    tokens.scatter_add_(2, page, wanted.long())
    tokens = tokens[..., :n_pages].view(steps, heads, -1, size // PAGE_TOKENS)
    rank = torch.full((steps, heads, n_pages + 1), width, dtype=torch.int64, device=ranked.device)
    order = torch.arange(width, device=ranked.device).expand_as(ranked)
    rank.scatter_reduce_(2, page, order, "amin")
    rank = rank[..., :n_pages].view(steps, heads, -1, size // PAGE_TOKENS).amin(-1)
    used = int((tokens.sum(-1) > 0).sum(-1).max()) if steps else 0
    _, ids = torch.sort(rank, dim=2, stable=True)
    ids = ids[..., :used]
    counts = torch.gather(tokens.sum(-1), 2, ids)
    pages = torch.where(counts > 0, size // PAGE_TOKENS, 0)
    touched = (tokens > 0).sum((-1, -2))
    return Blocks(torch.where(counts > 0, ids, -1), pages, counts, touched)


def best_blocks(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """The ``count`` best allowed blocks, best first, ties to the lowest: [T, H, ≤ count], -1 as padding.

    scores [T, H, B], allowed bool, broadcastable to it.
    """
    allowed = allowed.expand_as(scores)
    ranked = torch.argsort(scores.masked_fill(~allowed, -math.inf), dim=-1, descending=True, stable=True)
    ranked = ranked[..., :count]
    return torch.where(torch.gather(allowed, 2, ranked), ranked, -1)


def consecutive_blocks(chosen: Tensor, size: int, first: int = 0) -> tuple[Tensor, Blocks]:
    """Whole blocks of ``size`` consecutive tokens: their tokens [T, H, B·size], and what a cache sees.

    chosen [T, H, B] in rank order (-1 as padding); block b starts at position first + b·size and fills
    ⌈size / 8⌉ pages.
    """
    used = chosen >= 0
    starts = torch.where(used, first + chosen * size, -1)[..., None]
    tokens = torch.where(used[..., None], starts + torch.arange(size, device=chosen.device), -1)
    pages = torch.where(used, -(-size // PAGE_TOKENS), 0)
    return tokens.flatten(2), Blocks(chosen, pages, torch.where(used, size, 0), pages.sum(-1))


def retrieval(resident: Tensor, tokens: Tensor, blocks: Blocks, scan_bytes: Tensor) -> Selection:
    """The selection of ``resident`` tokens [T, H, S], and retrieved ``tokens`` [T, H, R] in ``blocks``."""
    return Selection(
        positions=torch.cat([resident, tokens], -1),
        scan_bytes=scan_bytes,
        resident=resident.shape[2],
        blocks=blocks.ids,
        block_pages=blocks.pages,
        block_tokens=blocks.tokens,
        touched_pages=blocks.touched,
    )


def cluster_tokens(clusters: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    """The tokens of chosen clusters, [T, H, S] padded with -1, cluster by cluster as given.

    clusters [T, H, R] (-1 as padding), order [H, M] tokens sorted by cluster, offsets [H, C + 1].
    """
    steps, heads, _ = clusters.shape
    chosen = clusters.clamp_min(0)
    table = offsets.expand(steps, -1, -1)
    first = torch.gather(table, 2, chosen)
    sizes = torch.where(clusters >= 0, torch.gather(table, 2, chosen + 1) - first, 0)
    ends = sizes.cumsum(-1)
    width = int(ends[..., -1].max()) if clusters.numel() else 0
    slot = torch.arange(width, device=clusters.device).expand(steps, heads, -1).contiguous()
    which = torch.searchsorted(ends, slot, right=True).clamp_max(clusters.shape[2] - 1)
    inside = slot - torch.gather(ends - sizes, 2, which)
    at = torch.gather(first, 2, which) + inside
    tokens = torch.gather(order.expand(steps, -1, -1), 2, at.clamp(0, max(order.shape[1] - 1, 0)))
    return torch.where(slot < ends[..., -1:], tokens, -1)
