"""Pinned spans: token ranges that a user wants resident whatever their score (system prompt, API docs)."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from kvtune.errors import InputError

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


def parse_spans(text: str) -> tuple[tuple[int, int], ...]:
    """Spans written as ``0-100,250-300``, first and last position included; a single position is a span.

    Returns (start, stop) pairs, ascending, overlapping or touching spans joined. Raises ``InputError`` on
    anything else.
    """
    spans: list[tuple[int, int]] = []
    for part in text.split(",") if text.strip() else []:
        match = _SPAN.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise InputError(f"'{part.strip()}' is not a span of positions", "write spans as 0-100,250-300")
        spans.append((first, last + 1))
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def span_positions(spans: tuple[tuple[int, int], ...], start: int, stop: int, device: torch.device) -> Tensor:
    """The positions of ``spans`` that lie in start…stop-1, ascending, [P] int64."""
    cut = ((max(a, start), min(b, stop)) for a, b in spans)
    inside = [torch.arange(a, b, device=device) for a, b in cut if a < b]
    return torch.cat(inside) if inside else torch.zeros(0, dtype=torch.int64, device=device)
