"""Synthetic accesses for the caching tests, and hypothesis strategies that draw them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from kvtune.caching import UnitAccesses

Step = list[tuple[int, int, int]]
"""Block id, pages and wanted tokens of each access, in rank order."""


def unit_of(
    steps: list[Step], context_tokens: int = 1000, truncated: list[int] | None = None
) -> UnitAccesses:
    """A unit from its steps written out."""
    flat = [access for step in steps for access in step]
    columns = np.array(flat, np.int64).reshape(-1, 3)
    return UnitAccesses(
        offsets=np.cumsum([0, *(len(step) for step in steps)], dtype=np.int64),
        blocks=columns[:, 0].copy(),
        pages=columns[:, 1].copy(),
        tokens=columns[:, 2].copy(),
        truncated=np.array(truncated or [0] * len(steps), np.int64),
        context_tokens=context_tokens,
    )


def steps_of(accesses: UnitAccesses) -> list[Step]:
    """Inverse of :func:`unit_of`."""
    rows = list(zip(accesses.blocks.tolist(), accesses.pages.tolist(), accesses.tokens.tolist()))
    bounds = accesses.offsets.tolist()
    return [rows[a:b] for a, b in pairwise(bounds)]


@st.composite
def units(draw: st.DrawFn, grow: bool = True, max_pages: int = 4) -> UnitAccesses:
    """Up to 14 steps over up to 10 blocks; with ``grow`` a block's page count may increase over time."""
    ids = draw(st.lists(st.integers(0, 60), min_size=1, max_size=10, unique=True))
    size = {block: draw(st.integers(1, max_pages)) for block in ids}
    steps: list[Step] = []
    for chosen in draw(st.lists(st.lists(st.sampled_from(ids), unique=True, max_size=8), max_size=14)):
        step = []
        for block in chosen:
            if grow and draw(st.integers(0, 5)) == 0:
                size[block] += 1
            pages = size[block]
            step.append((block, pages, draw(st.integers(0, 8 * pages))))
        steps.append(step)
    return unit_of(steps, context_tokens=draw(st.integers(0, 400)))


def random_unit(seed: int, steps: int = 60, blocks: int = 80, per_step: int = 12) -> UnitAccesses:
    """A longer unit with drifting, skewed accesses to clusters of 1…5 pages whose last page is partial."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 40, blocks)
    made = []
    for step in range(steps):
        weight = 1 / (1 + (np.arange(blocks) + step // 8) % blocks)
        chosen = rng.choice(blocks, per_step, replace=False, p=weight / weight.sum())
        made.append([(int(b), int(-(-tokens[b] // 8)), int(tokens[b])) for b in chosen])
    return unit_of(made, context_tokens=int(tokens.sum()))
