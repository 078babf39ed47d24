"""Request-level prefix caching: replay of a serving trace whose requests share prefix blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kvtune.caching.pages import dense_ids
from kvtune.caching.stack_distance import NEVER, stack_distances
from kvtune.errors import InputError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass
class PrefixTrace:
    """Requests in order of arrival; equal block ids mean an equal prefix up to and including that block.

    offsets [R + 1] int64: request r owns blocks[offsets[r]:offsets[r + 1]], root first
    blocks [sum] int64: prefix block ids
    input_tokens, output_tokens [R] int64
    block_tokens: tokens of a whole block (a request's last block may be partial)
    """

    offsets: NDArray[np.int64]
    blocks: NDArray[np.int64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    block_tokens: int


@dataclass(frozen=True)
class PrefixResult:
    """Blocks found and blocks asked for at one capacity (in blocks; ``None``: unlimited)."""

    capacity: int | None
    hit_blocks: int
    blocks: int

    @property
    def hit_ratio(self) -> float:
        """Hit blocks ÷ all blocks; NaN where no block was asked for."""
        return self.hit_blocks / self.blocks if self.blocks else float("nan")


def read_mooncake(path: str | Path) -> PrefixTrace:
    """Read a trace in Mooncake's format, ordered by timestamp (ties as in the file).

    One JSON object a line: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one per
    512-token prefix block). Raises ``InputError`` naming the line that cannot be understood.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise InputError(f"'{path}' is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"cannot read '{path}': {(error.strerror or 'error').lower()}") from None
    rows = [_request(line, f"'{path}' line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise InputError(f"'{path}' holds no requests")
    rows.sort(key=lambda row: row[0])
    return PrefixTrace(
        offsets=np.cumsum([0, *(len(row[3]) for row in rows)], dtype=np.int64),
        blocks=np.array([block for row in rows for block in row[3]], np.int64),
        input_tokens=np.array([row[1] for row in rows], np.int64),
        output_tokens=np.array([row[2] for row in rows], np.int64),
        block_tokens=MOONCAKE_BLOCK_TOKENS,
    )


def replay_prefixes(trace: PrefixTrace, capacities: Sequence[int | None]) -> list[PrefixResult]:
    """Prefix hits of an LRU block cache at every capacity, from one pass of stack distances.

    A request is looked up from its root until the first block that is missing, before anything of it is
    inserted; then all its blocks are touched from root to leaf. (So a long request's root is older than
    its leaf, and goes first.)
    """
    ids, n_ids = dense_ids(trace.blocks)
    counts = _first_capacity(trace.offsets, stack_distances(ids, n_ids, trace.offsets), n_ids)
    hits = np.cumsum(counts)
    largest = [n_ids if capacity is None else min(max(capacity, 0), n_ids) for capacity in capacities]
    return [
        PrefixResult(capacity, int(hits[size]), len(trace.blocks))
        for capacity, size in zip(capacities, largest)
    ]


def _request(line: str, where: str) -> tuple[float, int, int, list[int]]:
    """Timestamp, input tokens, output tokens and block ids of one line."""
    try:
        row: Any = json.loads(line)
        blocks = [int(block) for block in row["hash_ids"]]
        found = float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), blocks
    except (ValueError, TypeError, KeyError, OverflowError):
        raise InputError(
            f"{where} is not a request",
            "one JSON object with timestamp, input_length, output_length and hash_ids",
        ) from None
    if any(not 0 <= block < 2**63 for block in blocks) or min(found[1:3]) < 0:
        raise InputError(f"{where} has a negative or too large number")
    return found


@njit(cache=True, nogil=True)
def _first_capacity(offsets, distances, n_ids):
    """How many blocks become prefix hits at each capacity 0…n_ids: [n_ids + 1]."""
    counts = np.zeros(n_ids + 1, np.int64)
    for request in range(len(offsets) - 1):
        deepest = 0
        for k in range(offsets[request], offsets[request + 1]):
            if distances[k] == NEVER:
                break
            deepest = max(deepest, distances[k])
            counts[deepest] += 1
    return counts
