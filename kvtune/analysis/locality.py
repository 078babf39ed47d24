"""Temporal locality of attention: do decode steps that follow each other ask for the same tokens?

Steps are compared within one turn only: step t (earlier) and step t + lag (later).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LAGS = (1, 2, 4, 8, 16, 20, 32, 64, 128)
"""Lags in decode steps. 20 is there because RetroInfer (arXiv 2505.02922) reports its overlap at that gap."""

Pairs = tuple[Tensor, Tensor]


def lag_pairs(turns: Tensor, steps: Tensor, lag: int) -> Pairs:
    """Rows (earlier [P], later [P]) of all pairs of decode steps of one turn that lie ``lag`` steps apart.

    turns [T] and steps [T] label the rows; rows need not be sorted, nor steps complete.
    """
    row = {pair: index for index, pair in enumerate(zip(turns.tolist(), steps.tolist()))}
    found = [
        (index, row[turn, step + lag]) for (turn, step), index in row.items() if (turn, step + lag) in row
    ]
    earlier, later = zip(*found) if found else ((), ())
    return (
        torch.tensor(earlier, dtype=torch.long, device=turns.device),
        torch.tensor(later, dtype=torch.long, device=turns.device),
    )


def query_cosine(queries: Tensor, pairs: Pairs) -> Tensor:
    """Cosine of the post-RoPE queries of each pair: queries [T, Hq, d] → [P, Hq] float32."""
    unit = torch.nn.functional.normalize(queries.float(), dim=-1)
    return (unit[pairs[0]] * unit[pairs[1]]).sum(-1)


def top_tokens(scores: Tensor, count: int) -> Tensor:
    """The ``count`` highest-scoring tokens, best first: scores [..., N] → [..., count] int32.

    Tokens scored -inf (not eligible) and places beyond the last token are -1.
    """
    best = torch.topk(scores, min(count, scores.shape[-1]), dim=-1)
    tokens = best.indices.to(torch.int32).masked_fill(best.values == -math.inf, -1)
    return torch.nn.functional.pad(tokens, (0, count - tokens.shape[-1]), value=-1)


def common_tokens(positions: Tensor, pairs: Pairs, window: int | None) -> Tensor:
    """How many tokens both steps of each pair may see: positions [T] → [P] int64."""
    earlier, later = positions[pairs[0]], positions[pairs[1]]
    first = torch.zeros_like(later) if window is None else (later - window + 1).clamp_min(0)
    return (earlier - first + 1).clamp_min(0)


def overlap(top: Tensor, positions: Tensor, pairs: Pairs, k: int, window: int | None = None) -> Tensor:
    """Overlap@k: the share of the true top-k that both steps of a pair have in common, [P, Hq].

    Both steps are ranked over the same keys, those that both may see: the keys up to the earlier step's
    position (cut by the later step's window in a windowed layer). Otherwise the tokens made in between,
    which the earlier step could not have chosen, would lower the overlap. k is capped at their number.
    NaN where there is no common key.

    top [T, Hq, K] from :func:`top_tokens`, with K ≥ k + the largest distance of a pair (so that k
    candidates stay when the others' keys are struck out); row = position.
    """
    earlier, later = positions[pairs[0]], positions[pairs[1]]
    if len(earlier) and top.shape[-1] < k + int((later - earlier).max()):
        raise ValueError("top holds too few tokens for this lag")
    first = torch.zeros_like(later) if window is None else later - window + 1
    mine = _first_common(top[pairs[0]], first, earlier, k, absent=-1)
    theirs = _first_common(top[pairs[1]], first, earlier, k, absent=-2)
    common = _count_common(mine, theirs)
    return common / (mine >= 0).sum(-1)


def _first_common(top: Tensor, first: Tensor, last: Tensor, k: int, absent: int) -> Tensor:
    """Keep the best k tokens of top [P, Hq, K] that lie in first…last ([P] each); the others → ``absent``."""
    fits = (top >= 0) & (top >= first[:, None, None]) & (top <= last[:, None, None])
    kept = fits & (fits.cumsum(-1) <= k)
    return top.masked_fill(~kept, absent)


def _count_common(left: Tensor, right: Tensor) -> Tensor:
    """Number of non-negative entries of ``left`` [..., K] that ``right`` [..., K] holds too."""
    ordered = right.sort(-1).values.contiguous()
    place = torch.searchsorted(ordered, left.contiguous()).clamp_max(ordered.shape[-1] - 1)
    return ((torch.gather(ordered, -1, place) == left) & (left >= 0)).sum(-1)


def set_overlap(left: Tensor, right: Tensor) -> Tensor:
    """Share in common of two token sets of equal size, [..., K] each (-1: no entry) → [...]; NaN if empty."""
    return _count_common(left, right.masked_fill(right < 0, -2)) / (left >= 0).sum(-1)


def working_set(top: Tensor, turns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Distinct tokens among the top tokens of ``width`` consecutive steps (Denning's working set).

    top [T, Hq, k], -1 as padding; rows in step order. Each turn is cut into blocks of ``width`` rows that
    do not overlap; a shorter rest is left out. → sizes [B, Hq], turns [B].
    """
    blocks, owners = [top.new_zeros(0, width, *top.shape[1:])], [turns[:0]]
    for turn in turns.unique(sorted=True):
        rows = top[turns == turn]
        whole = len(rows) // width
        blocks.append(rows[: whole * width].view(whole, width, *rows.shape[1:]))
        owners.append(turn.repeat(whole))
    flat = torch.cat(blocks).transpose(1, 2).flatten(2).sort(-1).values
    fresh = torch.ones_like(flat, dtype=torch.bool)
    fresh[..., 1:] = flat[..., 1:] != flat[..., :-1]
    return (fresh & (flat >= 0)).sum(-1), torch.cat(owners)
