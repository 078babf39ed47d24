"""Prefill in chunks, greedy decoding and teacher forcing over one growing cache that can be cut back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvtune.models import LoadedModel, crop, feed, new_cache

CHUNK = 1024
"""Tokens of a prefill chunk, at most."""
_MASK_ENTRIES = 1 << 25
_SMALLEST_CHUNK = 128

Advance = Callable[[int], None]
"""Told how many more tokens went through the model."""


def chunk_length(total: int) -> int:
    """Tokens a chunk for a prefill that ends at ``total``: the chunk × total mask stays below 32 MiB."""
    return max(_SMALLEST_CHUNK, min(CHUNK, _MASK_ENTRIES // max(1, total)))


@dataclass(frozen=True)
class Mark:
    """A place on a timeline to come back to: its length and the logits after its last token."""

    length: int
    logits: Tensor


class Session:
    """One sequence on one model. ``length`` tokens are in the cache; the next gets position ``length``.

    ``room`` makes the cache one that grows in place (see :func:`kvtune.models.new_cache`).
    """

    def __init__(self, loaded: LoadedModel, advance: Advance = lambda tokens: None, room: int = 0) -> None:
        self.loaded = loaded
        self.cache = new_cache(room)
        self.length = 0
        self._advance = advance
        self._logits = torch.empty(0)

    @property
    def logits(self) -> Tensor:
        """[V] after the last token fed; empty before the first."""
        return self._logits

    def feed(self, ids: Sequence[int]) -> None:
        """Run ``ids`` through the model in chunks, after what was fed before."""
        device = self.loaded.device
        chunk = chunk_length(self.length + len(ids))
        for start in range(0, len(ids), chunk):
            part = torch.tensor(ids[start : start + chunk], device=device)
            self._logits = feed(self.loaded.model, part, self.cache)[-1]
            self.length += len(part)
            self._advance(len(part))

    def generate(self, limit: int) -> Iterator[int]:
        """Greedy answer tokens, each fed before it is yielded; ends before the end token or at ``limit``.

        The same tokens as the model's own ``generate(do_sample=False, max_new_tokens=limit)``, but every one
        of them, the last included, has gone through the model: one decode step per token.
        """
        for _ in range(limit):
            token = int(self._logits.argmax())
            if token in self.loaded.eos_ids:
                return
            self.feed([token])
            yield token

    def mark(self) -> Mark:
        return Mark(self.length, self._logits)

    def rewind(self, mark: Mark) -> None:
        """Forget everything fed since ``mark``, so that another branch can start there."""
        crop(self.cache, mark.length)
        self.length, self._logits = mark.length, mark.logits
