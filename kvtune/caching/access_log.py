"""What a policy asked of the cache, step by step: the value that every simulation replays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtune.errors import InputError
from kvtune.geometry import PAGE_TOKENS
from kvtune.policies.base import Selection

Unit = tuple[int, int, int, int]
"""(sample, timeline, layer, kv_head): one independent cache."""


@dataclass
class UnitAccesses:
    """Accesses of one unit, ragged by step and in rank order within a step.

    offsets [T + 1] int64: step t owns entries offsets[t]:offsets[t + 1]
    blocks, pages, tokens [sum] int64: block id, its pages of 8 tokens, the tokens wanted from it
    truncated [T] int64: blocks dropped at each step because the execution buffer was full
    context_tokens: tokens of the prompt, the base of a cache fraction

    A block is read whole: its pages are numbered 0…p-1 and keep their numbers, so its page count stays
    the same or grows as decoding fills it. A count that shrinks would leave open which pages were read.
    """

    offsets: NDArray[np.int64]
    blocks: NDArray[np.int64]
    pages: NDArray[np.int64]
    tokens: NDArray[np.int64]
    truncated: NDArray[np.int64]
    context_tokens: int

    @property
    def steps(self) -> int:
        return len(self.offsets) - 1

    def check(self, where: str = "access log") -> None:
        """Refuse what no cache can replay; ``where`` names the unit in the ``InputError``."""
        entries = len(self.blocks)
        offsets_valid = (
            len(self.offsets) > 0
            and self.offsets[0] == 0
            and self.offsets[-1] == entries
            and bool((np.diff(self.offsets) >= 0).all())
        )
        if not offsets_valid or not len(self.pages) == len(self.tokens) == entries:
            raise InputError(f"{where}: step offsets do not match the number of accesses")
        if entries == 0:
            return
        if self.blocks.min() < 0:
            raise InputError(f"{where}: block ids must not be negative")
        if self.pages.min() < 1:
            raise InputError(f"{where}: every access must read at least one page")
        if self.tokens.min() < 0 or bool((self.tokens > PAGE_TOKENS * self.pages).any()):
            raise InputError(f"{where}: an access wants more tokens than its pages hold")


@dataclass
class AccessLog:
    """All units of a run. ``page_bytes``: bytes of K and V of one page (8 tokens) in one kv head."""

    page_bytes: int
    units: dict[Unit, UnitAccesses] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[Unit, UnitAccesses]]:
        return iter(self.units.items())


def unit_accesses(selection: Selection, kv_head: int, context_tokens: int) -> UnitAccesses:
    """The accesses that ``selection`` makes in one kv head."""
    steps = selection.positions.shape[0]
    if selection.blocks is None or selection.block_pages is None or selection.block_tokens is None:
        empty = np.zeros(0, np.int64)
        return UnitAccesses(
            np.zeros(steps + 1, np.int64), empty, empty, empty, np.zeros(steps, np.int64), context_tokens
        )
    blocks = selection.blocks[:, kv_head].cpu().numpy()
    used = blocks >= 0
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(used.sum(1), dtype=np.int64)])
    truncated = (
        np.zeros(steps, np.int64)
        if selection.truncated is None
        else selection.truncated[:, kv_head].cpu().numpy().astype(np.int64)
    )
    return UnitAccesses(
        offsets=offsets,
        blocks=blocks[used].astype(np.int64),
        pages=selection.block_pages[:, kv_head].cpu().numpy()[used].astype(np.int64),
        tokens=selection.block_tokens[:, kv_head].cpu().numpy()[used].astype(np.int64),
        truncated=truncated,
        context_tokens=context_tokens,
    )


def join_accesses(parts: list[UnitAccesses], context_tokens: int) -> UnitAccesses:
    """Consecutive stretches of one unit as one."""
    ends = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    offsets = [part.offsets[1:] + end for part, end in zip(parts, ends)]
    empty = np.zeros(0, np.int64)
    return UnitAccesses(
        offsets=np.concatenate([np.zeros(1, np.int64), *offsets]).astype(np.int64),
        blocks=np.concatenate([empty, *(part.blocks for part in parts)]),
        pages=np.concatenate([empty, *(part.pages for part in parts)]),
        tokens=np.concatenate([empty, *(part.tokens for part in parts)]),
        truncated=np.concatenate([empty, *(part.truncated for part in parts)]),
        context_tokens=context_tokens,
    )
